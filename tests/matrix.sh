#!/usr/bin/env bash
# Runs the default tests as on other machines: older SIMD instructions, other thread counts, other random inputs.
#     tests/matrix.sh                 every cell; each takes four to eight minutes on two idle cores
#     tests/matrix.sh oldest newer    these cells alone
# Prints a row for each cell. The largest share is the largest error divided by its bound. Above 0.5 is too close.
set -uo pipefail
cd "$(dirname "$0")/.."

declare -A cells=(                              # environment | options of pytest
    [plain]="|"
    [scalar]="ATEN_CPU_CAPABILITY=default|"     # torch's own loops without SIMD
    [avx2]="ATEN_CPU_CAPABILITY=avx2|"
    [sse41]="ONEDNN_MAX_CPU_ISA=SSE41|"         # matrix products of oneDNN
    [threads2]="|--threads=2"
    [threads4]="|--threads=4"
    [seed1]="|--hypothesis-seed=1"
    [seed2]="|--hypothesis-seed=2"
    # two cells that change all at once, for .ci/run. MKL has torch's products; OpenBLAS numpy's, so the interpreter's
    [oldest]="ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OPENBLAS_CORETYPE=Nehalem|--threads=2 --hypothesis-seed=1"
    [newer]="ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell|--threads=4 --hypothesis-seed=2"
)
[ $# -gt 0 ] || set -- plain scalar avx2 sse41 threads2 threads4 seed1 seed2 oldest newer
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failures=0
printf '%-10s %8s %8s %14s %9s\n' cell passed failed 'largest share' minutes
for cell in "$@"; do
    [ -n "${cells[$cell]+x}" ] || { echo "no cell $cell: choose from ${!cells[*]}" >&2; exit 2; }
    IFS='|' read -r environment options <<<"${cells[$cell]}"
    began=$SECONDS
    # several processes with several threads each: threads that wait must not spin
    # shellcheck disable=SC2086                 # several words each
    env OMP_WAIT_POLICY=passive $environment python -m pytest --margins $options >"$log" 2>&1 || failures=$((failures + 1))
    printf '%-10s %8s %8s %14s %9s\n' "$cell" "$(grep -oP '\d+(?= passed)' "$log" | tail -1)" \
        "$(grep -oP '\d+(?= (failed|error))' "$log" | paste -sd+ | grep . || echo 0)" \
        "$(grep -oP '^\d+\.\d{3}(?=  test_)' "$log" | head -1)" "$(((SECONDS - began + 30) / 60))"
    grep -E '^(FAILED|ERROR) |^(0\.[5-9]|[1-9])[0-9.]*  test_' "$log"      # failures, and shares above 0.5
done
exit $((failures > 0))
