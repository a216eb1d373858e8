"""What the code never does, wherever it stands: docs/security.md says why."""

import ast
from collections.abc import Iterator
from pathlib import Path

import yaml

from orchestrator.document import _Loader

ROOT = Path(__file__).parents[2]
PRODUCT = ("orchestrator", "workers")
EVERYTHING = (*PRODUCT, "benchmarks", "dashboards", "examples", "tests", ".ci")

RUNS_CODE_MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
    "jsonpickle", "xmlrpc", "tarfile", "zipfile",
}  # fmt: skip
"""What reads data with these does whatever the data says; the last two write where it says."""

RUNS_CODE_CALLS = {
    "eval", "exec", "torch.load", "torch.jit.load", "torch.hub.load", "torch.package",
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "os.system", "os.popen",
    "dist.broadcast_object_list", "dist.all_gather_object", "dist.gather_object",
    "dist.scatter_object_list", "dist.send_object_list", "dist.recv_object_list",
    "tempfile.mktemp",
}  # fmt: skip

ANY_ADDRESS = "0.0.0.0"
EVERY_INTERFACE = {ANY_ADDRESS, "::", ""}


def trees(folders: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "node_modules" not in path.parts:
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").partition(".")[0]]
    return []


def given(call: ast.Call, name: str) -> object:
    """The constant that a keyword of a call has; None: another value, or none."""
    values = (k.value for k in call.keywords if k.arg == name)
    return next((v.value for v in values if isinstance(v, ast.Constant)), None)


def test_nothing_that_is_read_from_a_store_or_a_peer_can_run_code() -> None:
    found = []
    for name, tree in trees(PRODUCT):
        for node in ast.walk(tree):
            found += [(name, m) for m in imported(node) if m in RUNS_CODE_MODULES]
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in RUNS_CODE_CALLS or given(node, "shell") is True:
                found.append((name, called))
            elif called in ("np.load", "numpy.load") and given(node, "allow_pickle") is not False:
                found.append((name, f"{called} without allow_pickle=False"))
            elif called == "yaml.load" and [ast.unparse(a) for a in node.args][1:] != ["_Loader"]:
                found.append((name, called))
    assert found == []


def test_the_yaml_loader_knows_no_tags_of_python() -> None:
    assert issubclass(_Loader, yaml.SafeLoader)
    assert not [tag for tag in (*_Loader.yaml_constructors, *_Loader.yaml_multi_constructors)
                if tag is not None and "python" in tag]  # fmt: skip


def test_no_socket_is_bound_to_every_interface() -> None:
    found = []
    for name, tree in trees(EVERYTHING):
        if name == "tests/repo/test_security.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value == ANY_ADDRESS:
                found.append((name, node.lineno, ANY_ADDRESS))
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called.endswith(("create_server", ".bind")):
                hosts = [a.elts[0] for a in node.args[:1] if isinstance(a, ast.Tuple)]
                found += [
                    (name, node.lineno, called)
                    for host in hosts
                    if isinstance(host, ast.Constant) and host.value in EVERY_INTERFACE
                ]
            if called == "TCPStore" and given(node, "is_master") is True:
                bound = any(k.arg == "master_listen_fd" for k in node.keywords)
                found += [] if bound else [(name, node.lineno, "torch's store")]
    assert found == []
