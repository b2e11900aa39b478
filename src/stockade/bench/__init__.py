"""The bench: what Stockade costs, measured beside its rivals at the same time on the same machine.

`bars` is the table of required values, `sections` has the measurements,
`competitors` the contenders and their flags, `contender` the process that each
of them runs in, `report_table` the output and the baseline. The jobs done
behind the walls are in `inside.bench_jobs`, the attacks in
`inside.attack_probe`. Only ratios are judged: absolute times depend on the
machine.
"""
