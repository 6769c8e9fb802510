# Sourced by run and release: $work is the folder to work in.
export PIP_QUIET=2 PIP_DISABLE_PIP_VERSION_CHECK=1

# A fixed path, which ccache's keys contain: what run compiled, release need not.
work=${JAX_STREAMK_CI_DIR:-/tmp/jax_streamk-ci}
clone=$work/clone

oldest_jax=0.9.0

# These test C++ only: another Python or JAX changes nothing.
without_cpp_tests=(--ignore=tests/test_kernels.py --ignore=tests/test_planner.py)

stage() {
  local name=$1 begin=$SECONDS
  shift
  echo "=== $name"
  "$@"
  echo "=== $name: $((SECONDS - begin)) s"
}

python_at() {
  local candidate
  for candidate in "$(command -v "python$1")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1"*/bin/"python$1"; do
    # pyenv has shims also for versions that are not active.
    if [[ -n $candidate ]] && "$candidate" -c '' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python $1 on this machine" >&2
  return 1
}

# build_wheel cpu|cuda: a wheel of the source in $clone, in $work/wheels, as `pip install .` builds it with the options
# of docs/install.md, but without build isolation: the random names of its folders would miss ccache.
build_wheel() {
  local variant=$1 venv=$work/build-venv log=$work/$1.log options=(-C cmake.define.JAX_STREAMK_CUDA=OFF)
  rm -rf "$venv" "$work/wheels"
  "$(python_at 3.12)" -m venv "$venv"
  "$venv/bin/pip" install scikit-build-core nanobind cmake ninja "jaxlib==$oldest_jax" cmeel-eigen
  if [[ $variant == cuda ]]; then
    "$venv/bin/pip" install --no-deps nvidia-cutlass==4.2.0.0
    options=(-C cmake.define.JAX_STREAMK_CUDA=ON -C cmake.define.CMAKE_CUDA_ARCHITECTURES='80;90a'
             -C cmake.define.CMAKE_CUDA_FLAGS=-Xptxas=-v)
  fi
  if ! (cd "$clone" && PIP_QUIET=0 "$venv/bin/pip" wheel --verbose --no-build-isolation --no-deps \
      --wheel-dir "$work/wheels" . -C build-dir="$work/$variant-build" "${options[@]}") >"$log" 2>&1; then
    grep -i -A 20 -m 5 'error' "$log" || tail -50 "$log"
    return 1
  fi
  if [[ $variant == cuda ]]; then
    ccache --show-stats | grep -i 'hits\|misses' || true
    python3 "$clone/.ci/check_ptxas.py" "$log"
  fi
}

# expect_cuda_kernels PYTHON: the package that is installed there has kernels of each family.
expect_cuda_kernels() {
  (cd / && "$1" - <<'PROGRAM'
import collections
import jax_streamk
families = collections.Counter(kernel.family.name for kernel in jax_streamk.kernels())
print("kernels:", dict(families))
assert families["sm80"] and families["sm90"] and families["skinny"] and families["host"]
PROGRAM
  )
}
