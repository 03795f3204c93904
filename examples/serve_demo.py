"""Starts `jaxpaged serve`, asks it with the openai client and with curl, and leaves its live page open.

python examples/serve_demo.py [options of `jaxpaged serve`]
"""

import json
import re
import shlex
import signal
import subprocess
import sys

import openai

QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]


def main() -> None:
    command = [sys.executable, "-m", "jaxpaged", "serve", "--log-level", "warning", *sys.argv[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = server.stdout.readline()
        found = re.search(r"serves (.+) at (\S+)/v1", ready)
        if found is None:
            sys.exit(server.wait() or 1)
        try:
            print(ready)
            ask(found[1], found[2])
            if sys.stdin.isatty():
                input(f"\nThe live page is at {found[2]}. Enter ends the server.\n")
        finally:
            server.send_signal(signal.SIGTERM)


def ask(model: str, url: str) -> None:
    print(f">>> openai: {QUESTION[0]['content']}")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    chunks = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=96, temperature=0, stream=True
    )
    for chunk in chunks:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0})
    curl = ["curl", "-s", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    print(f"\n\n>>> {shlex.join(curl)}")
    print(json.dumps(json.loads(subprocess.check_output(curl)), indent=2))
    metrics = subprocess.check_output(["curl", "-s", f"{url}/metrics"], text=True)
    print(f"\n>>> curl -s {url}/metrics")
    print(
        "\n".join(
            line for line in metrics.splitlines() if re.match(r"vllm:(prompt|gen|prefix).*_total", line)
        )
    )


if __name__ == "__main__":
    main()
