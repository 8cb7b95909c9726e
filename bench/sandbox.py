"""Isolated executions a second of the sandbox, against starting an interpreter for each job, in one run.

    python -m bench.sandbox [--jobs 400]

Every job evaluates one expression in a fresh child of the zygote; the peer starts ``python -I -S -c`` for it.
"""

import argparse
import subprocess
import sys
import time

from data.sandbox.process import Job, Sandbox

PEER_SHARE = 10  # the peer runs a tenth of the jobs: it is slow and steady


def main() -> None:
    """Prints both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=400)
    num_jobs = parser.parse_args().jobs
    jobs = [Job("c,b,a", ("a", "b", "c"), ((index, 2, 3),)) for index in range(num_jobs)]
    with Sandbox() as sandbox:
        sandbox.run(jobs[:1])
        began = time.monotonic()
        results = sandbox.run(jobs)
        ours = num_jobs / (time.monotonic() - began)
    assert all(result.values == ((3, 2, index),) for index, result in enumerate(results))
    began = time.monotonic()
    for _ in range(num_jobs // PEER_SHARE):
        subprocess.run([sys.executable, "-I", "-S", "-c", "a,b,c=1,2,3; print(c,b,a)"], check=True, capture_output=True)
    peer = num_jobs // PEER_SHARE / (time.monotonic() - began)
    print(f"sandbox {ours:.0f}/s   process a job {peer:.0f}/s   ratio {ours / peer:.1f}")


if __name__ == "__main__":
    main()
