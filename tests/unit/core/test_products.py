"""From what drivers call devices to the kinds of the catalogue."""

import pytest

from orchestrator.core.cluster import known_kinds
from orchestrator.core.products import _products, product_kind
from orchestrator.runtime.inventory import ACCELERATOR_KINDS

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "gib", "kind"),
    [  # names as drivers print them; memory as torch counts it, a little less than is sold
        ("NVIDIA B200", 178.4, "b200"),
        ("AMD Instinct MI300X OAM", 191.7, "mi300x"),
        ("NVIDIA H200", 139.8, "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100-sxm"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("A100-SXM4-40GB", 39.6, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 79.2, "a100-80"),
        ("NVIDIA A40", 44.3, "a40"),
        ("NVIDIA RTX A6000", 47.4, "a6000"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA L40", 44.4, "l40"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA A10", 22.0, "a10"),
        ("NVIDIA A10G", 22.0, "a10g"),
        ("Tesla T4", 14.6, "t4"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32"),
        ("Tesla V100-SXM2-32GB-LS", 31.7, "v100-32"),
        ("Tesla V100-PCIE-16GB", 15.8, "v100-16"),
        ("Tesla V100-PCIE-32GB", 31.7, "v100-32"),
        ("Tesla V100-SXM3-32GB", 31.7, "v100-32"),
        ("Tesla P100-PCIE-16GB", 15.9, "p100"),
        ("Tesla P100-SXM2-16GB", 15.9, "p100"),
        ("NVIDIA GeForce RTX 3090", 23.7, "rtx-3090"),
        ("GeForce RTX 3090", 23.7, "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("GeForce RTX 2080 Ti", 10.8, "rtx-2080-ti"),
        ("GeForce GTX 1080 Ti", 10.9, "gtx-1080-ti"),
    ],
)
def test_a_product_is_of_the_kind_that_its_name_and_memory_say(
    name: str, gib: float, kind: str
) -> None:
    assert product_kind(name, round(gib * GIB)) == kind


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 NVL",  # 94 GB, other rates
        "NVIDIA H200 NVL",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",  # a part of one
        "NVIDIA T400",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "GRID T4-16Q",
        "Tesla V100S-PCIE-32GB",
        "",
    ],
)
def test_what_only_looks_like_a_known_product_is_unknown(name: str) -> None:
    assert product_kind(name, 40 * GIB) is None


def test_every_kind_that_a_product_or_an_accelerator_type_means_is_in_the_catalogue() -> None:
    meant = {kind for kinds in _products().values() for kind in kinds}
    assert meant | set(ACCELERATOR_KINDS.values()) <= set(known_kinds())
