"""Files of `deploy/` fit the server: schemas, names of metrics, options, paths. Nothing is built here."""

import json
import re
import tomllib
import types
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged import cli
from jaxpaged.commands.serve import KEY_VARIABLE, server_options
from jaxpaged.config import EngineConfig
from jaxpaged.engine.stats import Stats
from jaxpaged.serve.guard import OPEN_PATHS
from jaxpaged.serve.metrics import Metrics
from jaxpaged.serve.options import ServerOptions

DEPLOY = Path(__file__).parents[1] / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
KUBERNETES = "1.33"
EXTRAS = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# What a gateway's endpoint picker reads of a server, under vLLM's names.
PICKERS = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}


def objects():
    return [*yaml.safe_load_all((DEPLOY / "kubernetes/jaxpaged.yaml").read_text())]


def options_of(arguments):
    return server_options(cli.parser().parse_args(["serve", *arguments]))


@pytest.fixture(scope="module")
def metrics():
    """Return the names of all metrics that the server reports."""
    engine = types.SimpleNamespace(
        stats=Stats(num_blocks=8, num_free_blocks=8),
        config=EngineConfig(),
        cache_size=types.SimpleNamespace(block_size=16, num_blocks=8),
    )
    text = Metrics("tiny", engine).text().decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_manifests_are_as_kubernetes_wants_them():
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    kinds = [each["kind"] for each in objects()]
    assert kinds == ["Deployment", "Service", "PodDisruptionBudget"]
    for each in objects():
        validator.validate(each, desired_version=KUBERNETES, strict=True)
    deployment = objects()[0]
    deployment["spec"]["template"]["spec"]["containers"][0]["argz"] = []
    with pytest.raises(validator.ValidationError, match="argz"):
        validator.validate(deployment, desired_version=KUBERNETES, strict=True)


def test_manifests_ask_the_server_for_what_it_has():
    deployment, service, budget = (each["spec"] for each in objects())
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    options = options_of(container["args"])
    assert pod["terminationGracePeriodSeconds"] > options.drain_seconds
    [port] = container["ports"]
    assert port["containerPort"] == ServerOptions().port == service["ports"][0]["port"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in OPEN_PATHS  # they have no key
        assert container[probe]["httpGet"]["port"] == port["name"] == service["ports"][0]["targetPort"]
    assert container["env"][0]["name"] == KEY_VARIABLE
    labels = deployment["template"]["metadata"]["labels"]
    selectors = [each["selector"] for each in (deployment, budget)]
    assert [*(each["matchLabels"] for each in selectors), service["selector"]] == [labels] * 3
    annotations = deployment["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in OPEN_PATHS
    assert annotations["prometheus.io/port"] == str(port["containerPort"])


def test_every_metric_of_the_dashboard_and_of_an_endpoint_picker_is_there(metrics):
    board = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel["targets"])
    named = {*re.findall(r"(?:vllm|jaxpaged):\w+", asked)}
    assert len(named) > 12
    assert named <= metrics
    assert metrics >= PICKERS
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_what_compose_and_the_image_name_is_there():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    server = compose["services"]["jaxpaged"]
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).resolve() == DOCKERFILE
    assert KEY_VARIABLE in server["environment"]
    options_of(server["command"])
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in compose["volumes"]
    grafana = {
        name: yaml.safe_load((DEPLOY / f"grafana/{name}.yaml").read_text())
        for name in ("datasource", "dashboards")
    }
    [source] = grafana["datasource"]["datasources"]
    board = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["jaxpaged:8000"]}]

    lines = DOCKERFILE.read_text().replace("\\\n", " ").splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY")]
    assert all((DOCKERFILE.parents[1] / path).exists() for paths in copied for path in paths)
    assert {"serve", "structured", "cuda12"} <= {*EXTRAS}
    [entry] = [
        json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT")
    ]
    assert options_of(entry[2:]).port == 8000
