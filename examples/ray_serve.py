"""Two replicas of the server on Ray, behind http://127.0.0.1:8000/v1, each with what begins alike.

python examples/ray_serve.py
"""

import ray
from ray import serve

from jaxpaged.batch.ray import application

if __name__ == "__main__":
    ray.init(num_cpus=2)  # or ray.init("auto") on a machine of a cluster
    serve.start(http_options={"host": "127.0.0.1", "port": 8000})
    # With GPUs: resources={"num_gpus": 1}, and no num_blocks.
    serve.run(application("smollm2", num_replicas=2, num_blocks=513), blocking=True)
