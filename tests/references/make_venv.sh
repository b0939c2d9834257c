#!/bin/sh
# Make the venv of requirements.txt: make_venv.sh FOLDER. What cannot be installed is named, the
# rest is there (nothing without torch), and the exit status is 1.
set -u
venv=$1
listed=$(dirname "$0")/requirements.txt

found=
for python in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python \
    "$(uv python find 3.11 2>/dev/null)"; do
  if "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then
    found=$python
    break
  fi
done
if [ -z "$found" ]; then
  echo "NOT MADE: $venv needs Python 3.11 (python3.11 on PATH, pyenv's, or uv's), and there is none"
  exit 1
fi

"$found" -m venv "$venv" || { echo "NOT MADE: $venv ($found has no venv)"; exit 1; }
rm -f "$venv"/failed-*.log
missing=
while read -r requirement; do
  case $requirement in '' | '#'*) continue ;; esac
  # deepspeed: none of its CUDA or C++ operators is compiled.
  DS_BUILD_OPS=0 "$venv/bin/python" -m pip install --quiet "$requirement" </dev/null \
    >"$venv/pip.log" 2>&1 || {
    cp "$venv/pip.log" "$venv/failed-${requirement%%[!a-z]*}.log"
    missing="$missing ${requirement%%;*},"
    case $requirement in  # those that depend on torch would bring another build of it
      torch*) missing="$missing and what builds on it,"; break ;;
    esac
  }
done <"$listed"
if [ -n "$missing" ]; then
  echo "NOT INSTALLED in $venv:${missing%,} (pip's messages: $venv/failed-*.log)"
  exit 1
fi
touch "$venv/.installed"
