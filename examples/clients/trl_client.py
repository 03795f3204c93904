"""The client of TRL's trainers for a vLLM server, against a server of ours at port 8000.

    pip install trl torch requests
    jaxpaged serve --structured-outputs-mib 64

The client refuses to start without vLLM's package, which it uses for weights by NCCL alone.
"""

import sys

from trl.generation import vllm_client

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
vllm_client.is_vllm_available = lambda *args, **options: True
client = vllm_client.VLLMClient(base_url=URL, connection_timeout=60)
answer = client.generate(
    ["The capital of France is", "1, 2, 3,"], n=2, temperature=0.7, max_tokens=8, logprobs=2
)
print("generate:", {name: len(values) for name, values in answer.items()})
assert [len(each) for each in answer["completion_ids"]] == [8] * 4
assert [len(each) for each in answer["logprobs"]] == [8] * 4
regex = client.generate(["A number:"], max_tokens=8, structured_outputs_regex="[0-9]{3}")
print("generate, regex:", regex["completion_ids"])
message = [{"role": "user", "content": "Say hello."}]
told = client.chat([message], max_tokens=8)
print("chat:", {name: len(values) for name, values in told.items() if values is not None})
