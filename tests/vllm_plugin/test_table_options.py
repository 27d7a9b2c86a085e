"""What --additional-config says of the table."""

import pytest

from ple_inference.vllm_plugin.override import OverrideError
from ple_inference.vllm_plugin.table_options import TableOptions


def test_an_address_is_enough() -> None:
    options = TableOptions.of({"table": "unix:/run/t.sock", "disable": ["pp_orphan_kv"]})
    assert (options.table, options.lookup_deadline_s, options.wait_file) == ("unix:/run/t.sock", 60.0, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "triplex.table must name the daemon"),
        ({"table": ""}, "triplex.table must name the daemon"),
        ({"table": 7}, "triplex.table must name the daemon"),
        (
            {"table": "unix:/t", "tabel": 1},
            "triplex.tabel is not known: known are disable, lookup_deadline_s, table",
        ),
        ({"table": "unix:/t", "lookup_deadline_s": 0}, "triplex.lookup_deadline_s must be seconds, not 0"),
        ({"table": "unix:/t", "lookup_deadline_s": True}, "must be seconds, not True"),
        ({"table": "unix:/t", "table_wait_s": "60"}, "triplex.table_wait_s must be seconds, not '60'"),
        ({"table": "unix:/t", "table_wait_s": float("nan")}, "must be seconds, not nan"),
        ({"table": "unix:/t", "wait_file": 3}, "triplex.wait_file must be a path, not 3"),
    ],
)
def test_refusals_are_one_line(given: dict, words: str) -> None:
    with pytest.raises(OverrideError) as refusal:
        TableOptions.of(given)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
