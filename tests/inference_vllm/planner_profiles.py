"""Plans of one checkpoint for several profiles, in one process: importing vllm takes seconds.

python planner_profiles.py FOLDER PROFILE...      the plans as JSON, by profile
"""

import json
import sys
from pathlib import Path

from ple_inference.garbage import uncollected
from ple_inference.settings import load_settings
from ple_inference.vllm_engine.launch import compose
from ple_inference.vllm_engine.plan import as_json, make_plan


def main() -> None:
    folder, *profiles = sys.argv[1:]
    found = {}
    with uncollected():  # as the command has it
        for profile in profiles:
            flags = {"engine": "vllm", "model": Path(folder), "profile": profile}
            found[profile] = as_json(make_plan(compose(load_settings({}, flags, Path()), Path(), (), ())))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
