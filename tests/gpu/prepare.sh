#!/usr/bin/env bash
# Prepares a machine with an NVIDIA GPU for the tests of tier gpu, and runs them: 3 minutes at most once torch is there.
# Without a network: unpack wheels of the versions in constraints.txt somewhere and set PIP_FIND_LINKS and PIP_NO_INDEX.
set -euo pipefail
cd "$(dirname "$0")/../.."

nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv || { echo "no NVIDIA driver here" >&2; exit 1; }
make venv                                          # torch from PyPI is built for CUDA
.venv/bin/python - <<'PY'
import torch
print("torch", torch.__version__, "· CUDA", torch.version.cuda, "· GPUs", torch.cuda.device_count())
assert torch.cuda.is_available(), "this torch sees no GPU: install one for CUDA, not +cpu"
torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda")).sum().item()
PY
exec .venv/bin/python -m pytest tests/gpu -q "$@"
