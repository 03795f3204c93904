"""Answers prompts on Ray: two workers, each row's answer once, even if a worker is killed.

python examples/ray_batch.py prompts.jsonl answers/       # again, if it was interrupted: it goes on
"""

import sys

import ray

from jaxpaged.batch.ray import answer_files

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    ray.init(num_cpus=2)  # or ray.init("auto") on a machine of a cluster; all see the files and the folder
    sampling = {"temperature": 0.0, "max_tokens": 64}
    num_answered = answer_files(
        [sys.argv[1]],
        sys.argv[2],
        "smollm2",
        sampling,
        chat=True,
        num_workers=2,
        rows_per_part=64,
        num_blocks=513,
    )
    print(f"{num_answered} rows were answered; ray.data.read_json({sys.argv[2]!r}) has all of them")
