"""Families of metrics that are made when somebody asks, with the labels that all of a server's have."""

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

LABELS = ("model_name", "engine")


def single(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help_: str,
    value: float,
    labels: tuple[str, str],
) -> Metric:
    """Return a family of one value.

    name: with its prefix. labels: the model's name, and the engine's number.
    """
    family = kind(name, help_, labels=LABELS)
    family.add_metric(labels, value)
    return family
