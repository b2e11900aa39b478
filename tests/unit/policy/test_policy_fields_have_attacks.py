"""Every clause that a policy can write has a control behind it, and an attack that tries the control."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from stockade import Policy
from stockade.policy import Control, Limits, Reuse, Syscalls, WorkspaceRule

TESTS = Path(__file__).parents[2]
FOLDERS = (TESTS / "attacks", TESTS / "kernel", TESTS / "unit")
MODELS = {
    "": Policy,
    "limits.": Limits,
    "syscalls.": Syscalls,
    "workspace.": WorkspaceRule,
    "reuse.": Reuse,
}

#: The clause, the control that enforces it, and tests that attack that control.
ATTACKS: dict[str, tuple[Control, tuple[str, ...]]] = {
    "profile": (Control.FILES, ("test_a_system_path_that_no_one_needs_does_not_exist_inside",)),
    "read": (
        Control.FILES,
        (
            "test_a_file_that_may_only_be_read_cannot_be_changed",
            "test_a_directory_that_is_swapped_after_it_was_looked_at_is_refused",
            "test_a_socket_in_a_granted_directory_cannot_be_reached",
        ),
    ),
    "write": (
        Control.FILES,
        (
            "test_a_readable_file_cannot_be_made_writable_under_another_name",
            "test_a_set_uid_file_in_a_grant_gains_nothing",
        ),
    ),
    "deny": (
        Control.DENY,
        (
            "test_a_denied_file_cannot_be_read_under_any_name",
            "test_the_host_does_not_uncover_a_denied_file_by_working_on_it",
            "test_moving_the_directory_above_does_not_uncover_a_denied_file",
        ),
    ),
    "exec": (
        Control.EXEC,
        (
            "test_nothing_that_the_program_makes_can_be_executed",
            "test_a_program_that_is_not_listed_is_refused",
        ),
    ),
    "protect": (
        Control.PROTECT,
        (
            "test_nothing_can_be_put_into_a_protected_directory",
            "test_the_directory_above_a_protected_path_cannot_be_moved_out_of_the_way",
        ),
    ),
    "unprotect": (
        Control.PROTECT,
        (
            "test_git_on_the_host_runs_nothing_that_the_program_wrote",
            "test_what_tools_of_the_host_obey_is_listed_when_the_program_has_left_it",
        ),
    ),
    "hold_back": (Control.WORKSPACE_OVERLAY, ("test_are_known_to_a_later_commit",)),
    "allow_commit": (
        Control.WORKSPACE_OVERLAY,
        (
            "test_allow_nothing_that_is_protected",
            "test_of_a_project_nobody_trusts_may_hold_more_back_and_allow_nothing",
        ),
    ),
    "net": (
        Control.NETWORK_NONE,
        ("test_no_packet_leaves", "test_an_abstract_socket_of_the_host_cannot_be_reached"),
    ),
    "net_roots": (
        Control.NETWORK_HTTP,
        ("test_a_server_whose_certificate_the_roots_do_not_vouch_for_gets_no_request",),
    ),
    "secrets": (
        Control.SECRETS,
        (
            "test_a_placeholder_is_replaced_nowhere_but_where_the_policy_says_and_that_is_recorded",
            "test_a_value_that_a_server_sends_back_is_masked",
            "test_nothing_inside_has_the_value_or_the_key_of_the_authority",
            "test_a_project_that_nobody_trusts_runs_no_command_for_a_secret",
        ),
    ),
    "on_egress_end": (
        Control.NETWORK_RULES,
        ("test_a_run_ends_with_its_egress_process_if_the_policy_says_so",),
    ),
    "proxy": (
        Control.NETWORK_RULES,
        (
            "test_no_way_leads_to_anything_else",
            "test_messages_that_are_no_request_for_a_connection_are_refused",
            "test_no_process_of_the_host_can_use_it",
        ),
    ),
    "env": (Control.ENVIRONMENT, ("test_a_variable_goes_in_only_by_its_name",)),
    "pass_env": (Control.ENVIRONMENT, ("test_a_variable_goes_in_only_by_its_name",)),
    "image": (Control.FILES, ("test_an_image_that_is_not_there_is_never_replaced_by_the_host",)),
    "backend": (Control.PROCESSES, ("test_a_backend_that_is_not_there_is_never_replaced_by_another",)),
    "accept": (Control.IPC, ("test_only_what_is_accepted_by_name_may_be_missing",)),
    "workspace": (
        Control.WORKSPACE_OVERLAY,
        ("test_changes_in_an_overlay_workspace_stay_in_the_overlay",),
    ),
    "toolchain": (
        Control.FILES,
        (
            "test_a_workspace_cannot_have_anything_of_the_home_shown",
            "test_a_project_chooses_among_the_installed_versions_and_nothing_else",
        ),
    ),
    "delegate": (
        Control.FILES,
        (
            "test_a_child_is_given_no_more_than_its_parent_has",
            "test_a_link_put_in_the_place_of_a_directory_leads_nowhere",
            "test_a_child_ends_with_a_killed_supervisor",
        ),
    ),
    "limits": (Control.LIMITS_FILES, ("test_a_program_cannot_raise_its_own_limits",)),
    "syscalls": (Control.SYSCALLS, ("test_a_call_that_reaches_deep_into_the_kernel_is_refused",)),
    "limits.tasks": (Control.LIMITS_TASKS, ("test_a_fork_bomb_is_stopped_by_the_task_limit",)),
    "limits.memory": (Control.LIMITS_MEMORY, ("test_a_memory_bomb_is_ended_and_counted",)),
    "limits.cpu": (
        Control.LIMITS_CPU,
        ("test_a_busy_program_gets_no_more_than_its_share_of_the_cores",),
    ),
    "limits.cpu_time": (
        Control.LIMITS_CPU_TIME,
        ("test_processor_time_is_counted_also_of_those_that_nobody_waits_for",),
    ),
    "limits.wall": (Control.LIMITS_WALL, ("test_hiding_from_the_time_limit_is_of_no_use",)),
    "limits.output": (Control.LIMITS_OUTPUT, ("test_endless_output_is_capped_and_said",)),
    "limits.files": (Control.LIMITS_FILES, ("test_open_descriptors_are_limited",)),
    "limits.disk": (
        Control.LIMITS_DISK,
        (
            "test_filling_the_private_memory_stops_at_the_disk_limit",
            "test_files_without_content_stop_at_the_disk_limit_too",
        ),
    ),
    "limits.connections": (
        Control.LIMITS_NETWORK,
        (
            "test_connections_beyond_the_limit_are_refused_before_anything_is_dialled",
            "test_failed_connections_count_too",
        ),
    ),
    "limits.requests": (
        Control.LIMITS_NETWORK,
        (
            "test_requests_beyond_the_limit_never_arrive",
            "test_limits_that_nothing_could_count_are_refused",
        ),
    ),
    "limits.upload": (
        Control.LIMITS_NETWORK,
        (
            "test_no_byte_beyond_the_limit_leaves_over_one_connection_or_several",
            "test_a_change_of_ports_gives_no_fresh_budget",
        ),
    ),
    "limits.download": (
        Control.LIMITS_NETWORK,
        ("test_no_byte_beyond_the_limit_comes_in",),
    ),
    "limits.host_connections": (
        Control.LIMITS_NETWORK,
        ("test_each_host_has_a_limit_of_its_own",),
    ),
    "limits.host_requests": (
        Control.LIMITS_NETWORK,
        ("test_each_host_has_a_limit_of_its_own",),
    ),
    "limits.host_upload": (
        Control.LIMITS_NETWORK,
        ("test_each_host_has_a_limit_of_its_own",),
    ),
    "limits.host_download": (
        Control.LIMITS_NETWORK,
        ("test_each_host_has_a_limit_of_its_own",),
    ),
    "syscalls.allow": (
        Control.SYSCALLS,
        (
            "test_a_call_refused_on_principle_cannot_be_allowed",
            "test_no_policy_allows_a_nested_user_namespace",
        ),
    ),
    "syscalls.deny": (
        Control.SYSCALLS,
        ("test_a_denied_call_is_refused_on_top_of_the_built_in_ones",),
    ),
    "workspace.path": (Control.FILES, ("test_what_lies_beside_the_workspace_does_not_exist_inside",)),
    "workspace.mode": (
        Control.WORKSPACE_OVERLAY,
        (
            "test_a_link_in_the_workspace_does_not_lead_to_a_secret",
            "test_changes_in_an_overlay_workspace_stay_in_the_overlay",
        ),
    ),
    "workspace.durable": (
        Control.LIMITS_DISK,
        ("test_what_cannot_be_durable_is_refused_with_the_reason", "test_a_killed_supervisor_loses_nothing"),
    ),
    "receipts": (Control.CLEANUP, ("test_a_receipt_without_its_own_head_never_verifies",)),
    "reuse": (Control.CLEANUP, ("test_no_process_of_a_run_lives_on_beside_the_next",)),
    "reuse.requests": (
        Control.CLEANUP,
        ("test_it_takes_no_more_than_its_requests_its_age_and_its_idle_time",),
    ),
    "reuse.age": (
        Control.CLEANUP,
        ("test_it_takes_no_more_than_its_requests_its_age_and_its_idle_time",),
    ),
    "reuse.idle": (
        Control.CLEANUP,
        ("test_one_that_idles_is_ended_and_one_that_was_never_used_is_not",),
    ),
}
#: Controls that no clause asks for, because every run has them.
ALWAYS: dict[Control, tuple[str, ...]] = {
    Control.NETWORK_HTTP: (
        "test_every_request_of_a_connection_is_judged",
        "test_a_request_that_servers_read_in_different_ways_goes_nowhere",
    ),
    Control.NETWORK_RULES: (
        "test_a_name_outside_the_rules_does_not_exist_and_no_packet_leaves",
        "test_a_port_outside_the_rules_is_refused_at_once",
        "test_an_address_that_no_rule_names_is_refused",
        "test_a_question_with_a_secret_in_it_leaves_no_packet",
        "test_no_spelling_of_an_address_gets_past_rules_for_names",
        "test_a_hello_for_another_name_is_refused_on_every_port",
        "test_a_request_for_another_host_never_arrives",
        "test_no_trick_reaches_an_address_that_no_rule_names",
        "test_an_egress_process_killed_in_the_middle_ends_every_connection",
    ),
    Control.PROCESSES: ("test_a_process_outside_can_be_neither_read_nor_seized",),
    Control.IPC: ("test_an_abstract_socket_of_the_host_cannot_be_reached",),
    Control.PRIVILEGES: ("test_whoever_calls_the_program_has_no_capability",),
    Control.DEVICES: ("test_a_device_cannot_be_made",),
    Control.TERMINAL: ("test_keystrokes_cannot_be_typed_whatever_the_high_half_of_the_request_is",),
    Control.CLEANUP: ("test_everything_inside_dies_with_the_supervisor",),
}


def clauses() -> list[str]:
    return [prefix + name for prefix, model in MODELS.items() for name in model.__struct_fields__]


@pytest.fixture(scope="module")
def tests() -> set[str]:
    """The names of every test function in the two folders."""
    found = set()
    for file in (file for folder in FOLDERS for file in folder.rglob("test_*.py")):
        tree = ast.parse(file.read_text())
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in found if name.startswith("test_")}


@pytest.mark.parametrize("clause", clauses())
def test_the_clause_has_a_control_and_an_attack(clause: str, tests: set[str]) -> None:
    assert clause in ATTACKS, f"{clause} has no attack: write one, and its row in this file"
    control, attacks = ATTACKS[clause]
    assert control in Control
    assert attacks and set(attacks) <= tests, f"{clause}: no such test: {set(attacks) - tests}"


@pytest.mark.parametrize("control", Control)
def test_the_control_has_an_attack(control: Control, tests: set[str]) -> None:
    attacks = {name for wanted, names in ATTACKS.values() if wanted is control for name in names}
    attacks |= set(ALWAYS.get(control, ()))
    assert attacks, f"{control} has no attack: write one, and its row in this file"
    assert attacks <= tests


def test_no_row_is_of_a_clause_that_is_gone() -> None:
    assert set(ATTACKS) == set(clauses())
