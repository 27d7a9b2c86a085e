"""Print constraints for adding to an environment without changing it.

What is installed keeps its version; what is not gets the version of the lock that is named.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path


def main() -> None:
    installed = {normal(each.metadata["Name"]): each.version for each in distributions()}
    for name, version in sorted(installed.items()):
        print(f"{name}=={version}")
    for line in Path(sys.argv[1]).read_text().splitlines():
        if (named := re.match(r"[A-Za-z0-9._-]+", line)) and normal(named[0]) not in installed:
            print(line)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
