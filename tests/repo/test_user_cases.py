"""docs/user-cases.md is true: each case has a test that names it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
REFERENCE = re.compile(r"([\w.-]+/[\w.-]+)?#(\d+)")


def references(text: str) -> set[str]:
    """``owner/name#1, #2`` as whole references."""
    found, name = set(), ""
    for owner, number in REFERENCE.findall(text):
        name = owner or name
        found.add(f"{name}#{number}")
    return found


def cases() -> Iterator[tuple[str, str, str]]:
    """Reference, file and test of each line of the tables."""
    for line in (ROOT / "docs" / "user-cases.md").read_text("utf-8").splitlines():
        if line.startswith("| ") and "::" in line:
            _, told, tests, _ = (cell.strip() for cell in line.split("|"))
            for path, test in re.findall(r"`([\w/.]+)::(\w+)`", tests):
                for reference in references(told):
                    yield reference, path, test


def docstring(path: str, test: str) -> str:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert test in found, f"{path} has no {test}"
    return ast.get_docstring(found[test]) or ""


NEEDED = """
Placement, head, ray job submit: ray-project/ray#24875, #52202, #62483, #12562,
#61475, ray-project/ray-llm#51, ray-project/ray#65025, ray-project/kuberay#2161, #2153,
ray-project/ray#31183, #38142, #45602, #38566, #53635, #19236, ray-project/kuberay#1374,
ray-project/ray#20553, #23564,
verl-project/verl#2890.
Metrics and dashboards: ray-project/ray#47522, #47289, ray-project/kuberay#1493,
sgl-project/sglang#2677, ray-project/ray#28285.
"""
"""Cases that must be on the list, whatever else is."""


def test_every_case_of_ray_and_of_metrics_is_on_the_list() -> None:
    assert references(NEEDED) - {reference for reference, *_ in cases()} == set()


@pytest.mark.parametrize(("path", "test"), sorted({(path, test) for _, path, test in cases()}))
def test_each_test_of_the_list_names_its_cases(path: str, test: str) -> None:
    listed = {reference for reference, *place in cases() if place == [path, test]}
    assert listed <= references(docstring(path, test))


def test_the_readme_says_in_one_line_what_others_leave_to_the_user() -> None:
    """Unlike devices asked for: NVIDIA/Megatron-LM#922, #1757, Oneflow-Inc/oneflow#5119,
    yifding/hetseq#11, horovod/horovod#121. Answers: rare, not planned, set it by hand.
    """
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert any("unlike devices" in line for line in lines[:4])
    assert any("unequal shares are the point" in line for line in lines)


def test_no_private_name_of_torch_is_used() -> None:
    """deepspeedai/DeepSpeed#4459: a private call of torch changed, and training ended."""
    private = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("orchestrator", "workers")
        for path in (ROOT / folder).rglob("*.py")
        for name in private_names(path.read_text("utf-8"))
    }
    dispatch = "torch.utils._python_dispatch.TorchDispatchMode"  # where it is documented to live
    names = "randomness", "seeding", "units", "valueless"
    watchers = {f"workers/{name}.py: {dispatch}" for name in names}
    fake = "torch._subclasses.fake_tensor.FakeTensorMode"  # likewise; describes, never trains
    assert private <= {*watchers, f"workers/valueless.py: {fake}"}


OF_TORCH = re.compile(r"(torch|dist|nn|functional)\b[\w.]*\._(?!_)\w+$")


def private_names(text: str) -> Iterator[str]:
    """Names of torch that a module uses or imports, and that begin with an underscore."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            yield from (f"{node.module}.{name.name}" for name in node.names
                        if "._" in f"{node.module}.{name.name}")  # fmt: skip
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if re.match(r"torch\..*\b_", name.name))
        elif isinstance(node, ast.Attribute) and OF_TORCH.match(whole := ast.unparse(node)):
            yield whole


@pytest.mark.parametrize(
    "text",
    ["import torch._dynamo", "from torch.nn.modules.dropout import _DropoutNd", "torch._C._x()",
     "dist.distributed_c10d._get_default_group()", "from torch._utils import f"],
)  # fmt: skip
def test_private_names_are_found_however_they_are_used(text: str) -> None:
    """deepspeedai/DeepSpeed#4459: an import hides one as well as a call does."""
    assert list(private_names(text))


PAGES = [
    ROOT / "README.md",
    *(p for folder in ("docs", "deploy", "examples") for p in (ROOT / folder).rglob("*")),
]
SUBMITTED = re.compile(r"ray job submit\b[^\n]*?\s--\s+(\S)")


def test_no_example_quotes_the_command_that_ray_is_to_run() -> None:
    """Ray's page on its command line: what is quoted is taken for the name of one program."""
    found = [
        (str(path.relative_to(ROOT)), sign)
        for path in PAGES
        if path.is_file() and path.suffix in {".md", ".yaml", ".yml", ".py", ".sbatch", ""}
        for sign in SUBMITTED.findall(path.read_text("utf-8").replace("\\\n", " "))
    ]
    assert len({path for path, _ in found}) >= 2, "examples are found"
    assert [(path, sign) for path, sign in found if sign in "\"'"] == []
    job = yaml.safe_load((ROOT / "deploy" / "kuberay" / "rayjob.yaml").read_text("utf-8"))
    assert not set(job["spec"]["entrypoint"]) & set("\"'")


def test_nothing_is_placed_in_groups_and_one_module_says_where_workers_start() -> None:
    """ray-project/ray#12562, #61475: placement groups cannot be resized, one a replica is no use.

    Whoever wants a worker says for which place; what Ray is told then is up to one module.
    """
    texts = {p: p.read_text("utf-8") for p in (ROOT / "orchestrator").rglob("*.py")}
    assert [str(path) for path, text in texts.items() if "placement_group" in text] == []
    places = {p.name for p, text in texts.items() if "NodeAffinitySchedulingStrategy(" in text}
    assert places == {"actors.py", "life.py", "products.py"}  # workers; the head; asking a node
