"""The bench: what Stockade costs, beside its rivals, in the same minutes on the same machine.

`bars` is the table of what must hold, `sections` the measurements, `rivals`
the contenders and their flags, `worker` the process each of them runs in,
`inside` the jobs done behind the walls, `probe` the attacks tried on them,
`report` what is printed and kept. Only ratios are judged: absolute times
belong to the machine.
"""
