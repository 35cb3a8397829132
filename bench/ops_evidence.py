"""What of the kernels was checked without their devices: interpreted, compiled and emulated, one line each.

    python bench/ops_evidence.py [--output bench/results/cpu/ops_evidence.jsonl]

Interpreted and compiled need Triton, .metal sources a C++ compiler. Each line is {"op", "implementation",
"how", "on", "verified", "checks", ...}; `scripts/docs` puts them into docs/ops.md. None of this runs on a
device.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.metadata as metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IN_PYTORCH = (
    ("convolution", "gluon", "test_convolution_gluon.py"),
    ("upsample_conv", "gluon", "test_convolution_gluon.py"),
    ("linear", "cublaslt", "test_cublaslt.py"),
)
"""What is emulated in PyTorch, by a file of tests/ops."""


def triton(job: str, which: str) -> list[dict[str, Any]]:
    """The JSON lines of one job of tests/ops; none where Triton is absent."""
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        print("triton is not installed: nothing is interpreted or compiled", file=sys.stderr)
        return []
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    if job == "interpreted":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", f"ops.{job}", which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def by_implementation(lines: list[dict[str, Any]], how: str) -> Iterator[dict[str, Any]]:
    """One line an implementation: verified where no check found a problem."""
    counted: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for line in lines:
        counted[line["op"], line.get("implementation", "triton")].append(line)
    for (op, implementation), checks in sorted(counted.items()):
        targets = sorted({line["sm"] for line in checks if "sm" in line})
        yield {
            "op": op,
            "implementation": implementation,
            "how": how,
            "on": ", ".join(f"sm_{number}" for number in targets) or "CPU",
            "verified": not any(line["problem"] for line in checks),
            "checks": len(checks),
        }


def emulated() -> Iterator[dict[str, Any]]:
    """One line a .metal source, or what is emulated in PyTorch, whose tests pass."""
    sources = sorted((ROOT / "src" / "clearway" / "ops").glob("*.metal"))
    metal = [(source.stem, "metal", f"metal/test_{source.stem}.py") for source in sources]
    for op, implementation, name in (*metal, *((*one, f"ops/{name}") for *one, name in IN_PYTORCH)):
        tests = ROOT / "tests" / name
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not cuda",
            str(tests),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
        words = last.replace("=", " ").replace(",", " ").split()
        passed = int(words[words.index("passed") - 1]) if "passed" in words else 0
        yield {
            "op": op,
            "implementation": implementation,
            "how": "emulated",
            "on": "CPU",
            "verified": done.returncode == 0 and passed > 0 and "skipped" not in words,
            "checks": passed,
        }


def main() -> int:
    """Writes the lines; exit code 1 where something was not verified."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "bench" / "results" / "cpu" / "ops_evidence.jsonl"
    )
    args = parser.parse_args()
    interpreted = [*triton("interpreted", "cases"), *triton("interpreted", "others")]
    lines = [
        *by_implementation(interpreted, "interpreted"),
        *by_implementation(triton("compiled", "sample"), "compiled"),
        *emulated(),
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    versions = {name: metadata.version(name) for name in ("torch", "triton", "numpy") if _installed(name)}
    provenance = {"versions": versions, "date": datetime.date.today().isoformat(), "commit": commit}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(
        "".join(json.dumps({**line, **provenance}) + "\n" for line in lines), encoding="utf-8"
    )
    failed = [line for line in lines if not line["verified"]]
    for line in failed:
        print(f"not verified: {line}", file=sys.stderr)
    print(f"{len(lines) - len(failed)} of {len(lines)} verified, in {args.output}")
    return 1 if failed else 0


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
