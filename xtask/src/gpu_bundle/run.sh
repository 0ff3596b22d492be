#!/bin/bash
# Tests and measures on this machine's GPU, or on the simulated one: bash run.sh --help
set -u
export PATH="${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}" LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 1

readonly ALL="smoke conformance stress recipe layers cudnn nccl training benchmarks peers te"
# Parts of the benchmarks, in which ours and others are measured right after each other.
readonly PARTS="kernels profile rivals products"
# What to run where each command has ten minutes: three calls, with the same --out.
readonly CALL_1="smoke conformance layers recipe nccl kernels profile"
readonly CALL_2="cudnn rivals"
readonly CALL_3="products te"
# What matters most comes first, for time may run out.
readonly SECTIONS="gemm layer memory blocks passes attention scales adamw host"
# Those that bench_peers.py has, too.
readonly PEERS="gemm layer memory attention scales adamw host"
# Those of them in which torch compiles many functions, which may take minutes.
readonly COMPILED="layer scales memory"
# Those that Transformer Engine's core library has functions for.
readonly CORE="gemm memory scales adamw host"
# Seconds a suite may take: below the ten minutes after which some machines end a command.
LIMIT=530
# Of these, a section: one that hangs leaves time to the others. The second is for what compiles, and for what ends a case
# that hangs by itself.
readonly SECTION_LIMIT=180 LONG_LIMIT=300
# Seconds that a whole call of --call may take, with room for what is written afterwards.
readonly CALL_LIMIT=570

usage() {
    cat <<END
usage: run.sh [SUITE... | --call N] [--out DIR] [--simulate] [--list]

Runs all suites, or those named, and writes DIR/results.json and DIR/results.md after each. What other calls with the
same DIR found stays in there, until its suite runs again. The exit code is 0 if nothing failed in this call.

  --call N     1, 2 or 3: the suites of one of three calls, each of which ends within ten minutes
  --out DIR    where results, logs and the unpacked programs go [default: results beside run.sh]
  --simulate   use the simulated GPU that is in this folder: small sizes, nothing timed
  --list       list the suites

Libraries in carried/, compressed by xz, are used before the machine's.
FP8_CUDA_LIB_DIR names folders with NVIDIA's libraries that are looked at before all others,
PYTHON the interpreter that has torch [default: python3].
END
}

list() {
    cat <<END
smoke        the device, the reference data, a few operations (a minute)
conformance  every operation against the CPU
stress       sizes that only a real device does in reasonable time
recipe       scaling state, scopes, histories
layers       layers, models, optimizer, checkpoints, recorded steps
cudnn        attention and layers by cuDNN, where it is installed in version 9.19 or newer
nccl         groups of GPUs
training     a GPT in high precision and in FP8, eager and as a graph
benchmarks   times and throughput
peers        the same of other libraries, where torch is installed
te           the same of Transformer Engine's core library, where it and torch are installed

Parts of the last three, which run only if they are named:
kernels      gpu_bench's memory, blocks, passes, attention and layer
profile      Nsight Compute on the kernels that are furthest from the ceiling, where ncu is installed
rivals       attention and layer: ours, then cuDNN, flash and Transformer Engine, then ours again
products     matrix products without and with tuning, in turns; what calls cost the host

Calls, for --call:
1            $CALL_1
2            $CALL_2
3            $CALL_3
END
}

die() {
    echo "run.sh: $*" >&2
    exit 1
}

# each PROGRAM FILE: every test that FILE names in a process of its own, for what one does to the device others would meet.
each() {
    local name output code passed=0 broken=0
    while read -r name; do
        output=$(timeout --foreground -k 5 120 "$1" --exact "$name" 2>&1 </dev/null)
        code=$?
        if [ $code -eq 0 ]; then
            passed=$((passed + 1))
            echo "test $name ... ok"
        else
            broken=$((broken + 1))
            echo "test $name ... FAILED, exit code $code"
            printf '%s\n' "$output" | sed 's/^/    | /'
        fi
    done <"$2"
    echo "test result: $passed passed; $broken failed"
    [ $broken -eq 0 ]
}

if [ "${1:-}" = --each ]; then
    each "$2" "$3"
    exit
fi

out=$here/results simulate=no suites= deadline=
while [ $# -gt 0 ]; do
    case $1 in
    --out) [ $# -gt 1 ] || die "--out needs a folder"; out=$2; shift ;;
    --out=*) out=${1#--out=} ;;
    --call)
        case ${2:-} in
        1) suites="$suites $CALL_1" ;;
        2) suites="$suites $CALL_2" ;;
        3) suites="$suites $CALL_3" ;;
        *) die "--call needs 1, 2 or 3" ;;
        esac
        deadline=$CALL_LIMIT
        shift
        ;;
    --simulate) simulate=yes; export FP8_CONFORMANCE_DRY_RUN=1 ;;
    --list) list; exit 0 ;;
    -h | --help) usage; exit 0 ;;
    -*) die "unknown option $1; --help lists the options" ;;
    *)
        case " $ALL $PARTS " in
        *" $1 "*) suites="$suites $1" ;;
        *) die "unknown suite $1; the suites are $ALL $PARTS" ;;
        esac
        ;;
    esac
    shift
done
suites=${suites:-$ALL}
# On the simulated GPU everything takes longer, and nobody ends it.
[ $simulate = no ] || LIMIT=3600 deadline=
mkdir -p "$out/logs" "$out/bin" && out=$(cd "$out" && pwd) || die "cannot write to $out"

# ---- programs -----------------------------------------------------------------------------------------------------

bin=$out/bin
unxz() {
    if command -v xz >/dev/null 2>&1; then
        xz -dc "$1"
    else
        "${PYTHON:-python3}" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), sys.stdout.buffer)' "$1"
    fi
}
(
    set -o pipefail
    unxz "$here/bin.tar.xz" | tar -xf - --no-same-owner -C "$bin"
) || die "cannot unpack $here/bin.tar.xz to $bin"

# Libraries that somebody put beside this script, because the machine has none or older ones.
carried=$out/carried
for packed in "$here"/carried/*.xz; do
    [ -e "$packed" ] || continue
    name=${packed##*/} name=${name%.xz}
    mkdir -p "$carried" && unxz "$packed" >"$carried/$name.tmp" && mv -f "$carried/$name.tmp" "$carried/$name" ||
        die "cannot unpack $packed to $carried"
done
if [ -e "$carried/libtransformer_engine.so" ]; then
    export FP8_TE_LIBRARY=${FP8_TE_LIBRARY:-$carried/libtransformer_engine.so}
fi

# ---- NVIDIA's libraries -------------------------------------------------------------------------------------------

# Folders that may hold them: of pip's packages, of torch, of CUDA, of the driver.
folders() {
    local base site
    for base in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "${HOME:+$HOME/.local}" /usr/local /usr /opt/* /opt/*/.venv; do
        [ -n "$base" ] && printf '%s\n' "$base"/lib/python3*/site-packages "$base"/lib/python3*/dist-packages
    done | cat - <(
        command -v "${PYTHON:-python3}" >/dev/null 2>&1 && "${PYTHON:-python3}" -c '
import site, sys
print("\n".join([p for p in sys.path if p] + site.getsitepackages() + [site.getusersitepackages()]))' 2>/dev/null
        echo /usr/lib/python3/dist-packages
    ) | while read -r site; do
        [ -d "$site" ] && printf '%s\n' "$site"/nvidia/cu13/lib "$site"/nvidia/*/lib "$site"/torch/lib
    done
    printf '%s\n' "${CUDA_HOME:+$CUDA_HOME/lib64}" /usr/local/cuda/lib64 /usr/local/cuda-1*/lib64 \
        /usr/local/cuda/targets/x86_64-linux/lib /usr/local/nvidia/lib64 /usr/lib/x86_64-linux-gnu /usr/lib64
}

# The first folder that has each library, in FP8_CUDA_LIB_DIR; what was found, in $libraries.
find_libraries() {
    local all name folder found
    all=$(printf '%s\n' "${FP8_CUDA_LIB_DIR:-}" | tr ':' '\n'; echo "$carried"; folders)
    libraries=
    local path=${FP8_CUDA_LIB_DIR:-}
    for name in libcuda.so.1 libnvrtc.so.13 libcublasLt.so.13 libcudnn.so.9 libnccl.so.2 libnvrtc.so.12 libcublasLt.so.12; do
        found=$(while read -r folder; do
            [ -n "$folder" ] && [ -e "$folder/$name" ] && echo "$folder" && break
        done <<<"$all")
        [ -n "$found" ] || continue
        libraries="$libraries$name: $(readlink -f "$found/$name")"$'\n'
        case ":$path:" in *":$found:"*) ;; *) path=${path:+$path:}$found ;; esac
    done
    export FP8_CUDA_LIB_DIR=$path
}

use_simulator() {
    local folder=$out/simulated name
    mkdir -p "$folder" || exit 1
    for name in libcuda.so.1 libnvrtc.so.13 libcublasLt.so.13 libcudnn.so.9 libnccl.so.2; do
        ln -sfn "$bin/libfp8_cuda_sim.so" "$folder/$name" || exit 1
    done
    export FP8_CUDA_LIB_DIR=$folder FP8_SIM_CUDNN=${FP8_SIM_CUDNN:-92801}
    libraries="all of them: $bin/libfp8_cuda_sim.so"$'\n'
}

# ---- results ------------------------------------------------------------------------------------------------------

# Rows of this call; those of earlier ones too are in suites.jsonl.
rows=() failed=0 clocks=
simulated=$([ $simulate = yes ] && echo true || echo false)
started=$(date -u +%Y-%m-%dT%H:%M:%SZ)

text() { # a JSON string
    printf '"%s"' "$(printf %s "$1" | tr -d '\000-\010\013-\037' | tr '\n\t' '  ' | sed 's/\\/\\\\/g; s/"/\\"/g')"
}

# suite, step, status, seconds, passed, failed, ignored, remark
record() {
    local row
    row=$(printf '{"suite": %s, "step": %s, "status": "%s", "seconds": %s, "passed": %s, "failed": %s, "ignored": %s' \
        "$(text "$1")" "$(text "$2")" "$3" "$4" "$5" "$6" "$7")
    row=$(printf '%s, "remark": %s, "simulated": %s%s}' \
        "$row" "$(text "$8")" $simulated "${clocks:+, \"gpu\": {$clocks\}}")
    rows+=("$row")
    printf '%s\n' "$row" >>"$out/suites.jsonl"
    [ "$3" = passed ] || [ "$3" = skipped ] || failed=$((failed + 1))
    echo "== $1: $2: $3${8:+ ($8)}, $4 s, $5 passed, $6 failed, $7 ignored"
}

# keep OPTION... PATTERN: those rows of suites.jsonl that grep finds.
keep() {
    touch "$out/suites.jsonl" || exit 1
    grep "$@" "$out/suites.jsonl" >"$out/suites.jsonl.tmp"
    [ $? -le 1 ] && mv "$out/suites.jsonl.tmp" "$out/suites.jsonl"
}

# Rows as lines of a Markdown table. A quote inside a string is escaped: what looks like a name or an end is one.
table() {
    printf '| suite | step | status | s | passed | failed | ignored | remark |\n|---|---|---|---|---|---|---|---|\n'
    sed -e 's/|/\\|/g' -e 's/^{"suite": "/| /' -e 's/", "step": "/ | /' -e 's/", "status": "/ | /' \
        -e 's/", "seconds": / | /' -e 's/, "passed": / | /' -e 's/, "failed": / | /' -e 's/, "ignored": / | /' \
        -e 's/, "remark": "", "simulated": [a-z]*, "gpu": {/ | /' -e 's/, "remark": "/ | /' \
        -e 's/", "simulated": [a-z]*, "gpu": {/; /' -e 's/"\([a-z_]*\)": \[/\1: [/g' \
        -e 's/\]}}$/] |/' -e 's/", "simulated": [a-z]*}$/ |/' -e 's/\\\(["\\]\)/\1/g' "$@"
}

joined() { # whole lines as elements of an array
    awk '/^[{].*[}]$/ { printf "%s    %s", (n++ ? ",\n" : ""), $0 } END { if (n) print "" }' "$@"
}

write_results() {
    local measured=() file
    # A simulated GPU has measured nothing: what lies there is an earlier call's.
    [ $simulate = yes ] ||
        for file in "$out"/ours*.jsonl "$out"/peers*.jsonl "$out/te.jsonl"; do [ -s "$file" ] && measured+=("$file"); done
    {
        printf '{\n  "started": "%s",\n  "simulated": %s,\n' "$started" $simulated
        printf '  "device": %s,\n  "gpu": %s,\n  "libraries": %s,\n' "$(text "$device")" "$(text "$gpu")" "$(text "$libraries")"
        printf '  "suites": [\n'
        joined "$out/suites.jsonl"
        printf '  ],\n  "measurements": [\n'
        [ ${#measured[@]} -eq 0 ] || joined "${measured[@]}"
        printf '  ]\n}\n'
    } >"$out/results.json.tmp" && mv "$out/results.json.tmp" "$out/results.json"
    {
        printf '# %s\n\nLast started %s.\n\n' "$device" "$started"
        printf '```\n%s\n%s```\n\n' "$gpu" "$libraries"
        table "$out/suites.jsonl"
        echo
        [ ${#measured[@]} -eq 0 ] || "$bin/gpu_bench" --report "${measured[@]}"
    } >"$out/results.md.tmp" && mv "$out/results.md.tmp" "$out/results.md"
}

# ---- the GPU's clocks -----------------------------------------------------------------------------------------------

sampler= samples= with_clocks= cap=$LIMIT

# Asks nvidia-smi five times a second, where it is there.
watch_clocks() {
    command -v nvidia-smi >/dev/null 2>&1 || return 0
    samples=$out/logs/$suite-clocks.csv
    nvidia-smi -i "${CUDA_VISIBLE_DEVICES:-0}" -lms 200 --format=csv,noheader,nounits \
        --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw >"$samples" 2>/dev/null </dev/null &
    sampler=$!
}

# Minimum, median and maximum of each into $clocks: "sm_mhz": [210, 1980, 1980], …
unwatch_clocks() {
    local column=0 name
    clocks=
    [ -n "$sampler" ] || return 0
    kill "$sampler" 2>/dev/null
    wait "$sampler" 2>/dev/null
    sampler=
    for name in sm_mhz mem_mhz temperature_c power_w; do
        column=$((column + 1))
        clocks=$clocks$(awk -F, -v c=$column '$c + 0 > 0 { print $c + 0 }' "$samples" | sort -g |
            awk -v name=$name -v comma="${clocks:+, }" '{ v[NR] = $1 } END { if (NR)
                printf "%s\"%s\": [%s, %s, %s]", comma, name, v[1], v[int((NR + 1) / 2)], v[NR] }')
    done
}

# timed SECONDS NAME COMMAND...: a step of at most so long, during which the GPU's clocks are watched. Something may end this
# script before the suite ends: what was measured is written down at once.
timed() {
    local name=$2
    cap=$1 with_clocks=yes
    shift 2
    step "$name" program "$@"
    cap=$LIMIT with_clocks= clocks=
    write_results
}

# ---- steps --------------------------------------------------------------------------------------------------------

# step NAME KIND COMMAND...: runs it in what is left of the suite's time, and in $cap seconds at most. KIND `tests` has to
# report at least one passed test, `program` has to end well.
step() {
    local name=$1 kind=$2 log start left status remark counts seconds paths=()
    shift 2
    # NVIDIA's libraries open each other by name. Python's packages know where their own are.
    case "$*" in
    *bench_peers.py* | *bench_te_core.py*) ;;
    *) paths=(env "LD_LIBRARY_PATH=$FP8_CUDA_LIB_DIR${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}") ;;
    esac
    log=$out/logs/$suite-${name//[^A-Za-z0-9]/_}.log
    left=$((LIMIT - (SECONDS - suite_start)))
    if [ $left -lt 5 ]; then
        record "$suite" "$name" failed 0 0 0 0 "no time left in the suite's $LIMIT s"
        return
    fi
    # What a call has no time for is not wrong: it is left to another.
    if [ -n "$deadline" ] && [ $((deadline - SECONDS)) -lt 5 ]; then
        record "$suite" "$name" skipped 0 0 0 0 "no time left in the call's $deadline s"
        return
    fi
    if [ -n "$deadline" ] && [ $left -gt $((deadline - SECONDS)) ]; then
        left=$((deadline - SECONDS))
    fi
    [ $left -le $cap ] || left=$cap
    echo "-- $suite: $name: $*"
    [ -z "$with_clocks" ] || watch_clocks
    start=$SECONDS
    timeout -k 5 "$left" "${paths[@]}" "$@" 2>&1 </dev/null | tee "$log"
    status=${PIPESTATUS[0]}
    [ -z "$with_clocks" ] || unwatch_clocks
    seconds=$((SECONDS - start))
    # The last of "test result: ok. 3 passed; 0 failed; 1 ignored; …" and "3 passed, 0 failed".
    counts=$(awk '/^ +\|/ { next }
        /[0-9]+ passed[;,] [0-9]+ failed/ { p = f = g = 0; for (i = 2; i <= NF; i++) { if ($i ~ /^passed/) p = $(i - 1)
        if ($i ~ /^failed/) f = $(i - 1); if ($i ~ /^ignored/) g = $(i - 1) } }
        END { printf "%d %d %d", p, f, g }' "$log")
    read -r passed broken ignored <<<"$counts"
    case $status in
    0)
        remark=
        status=passed
        if [ "$kind" = tests ] && [ "$passed" -eq 0 ]; then
            status=failed remark="no test ran"
        fi
        ;;
    124 | 137) status=failed remark="stopped after $left s" ;;
    *)
        # Above 128 a signal ended it.
        remark="exit code $status"
        [ "$status" -gt 128 ] && remark="ended by signal $((status - 128))"
        status=failed
        ;;
    esac
    record "$suite" "$name" $status $seconds "$passed" "$broken" "$ignored" "$remark"
}

# demand NAME TEXT: the log of that step has a line that begins so.
demand() {
    grep -q "^$2" "$out/logs/$suite-${1//[^A-Za-z0-9]/_}.log" 2>/dev/null ||
        record "$suite" "$1, where it ran" failed 0 0 1 0 "no line \"$2\" in its log"
}

skip() { record "$suite" "$1" skipped 0 0 0 0 "$2"; }

# alone NAME PROGRAM FILE: the tests that FILE names, each in a process of its own.
alone() { step "$1" tests "$BASH" "$here/run.sh" --each "$2" "$3"; }

# names PROGRAM [FILTER]: of its tests.
names() { "$@" --list 2>/dev/null </dev/null | sed -n 's/: test$//p'; }

conformance() { # its filter
    local before=$failed log=$out/logs/$suite-${1//[^A-Za-z0-9]/_}.log rest=$out/logs/$suite-again.txt
    export FP8_CONFORMANCE_BACKEND=cuda
    step "$1" tests "$bin/conformance" "$1"
    if [ $failed -gt $before ]; then
        # A case that breaks the device takes those behind it along: what fails alone is what is broken.
        names "$bin/conformance" "$1" | awk 'NR == FNR { if ($1 == "test" && !/FAILED/) done[$2]; next }
            !($0 in done)' "$log" - >"$rest"
        alone "$1, what failed or did not run, one by one" "$bin/conformance" "$rest"
    fi
    unset FP8_CONFORMANCE_BACKEND
}

# tests PROGRAM [FILTER]: a suite that keeps one device for all its tests, which are not made to take turns.
tests() {
    export FP8_TEST_DEVICE=cuda
    names "$bin/$1" ${2:+"$2"} >"$out/logs/$suite.txt"
    alone "each by itself" "$bin/$1" "$out/logs/$suite.txt"
    unset FP8_TEST_DEVICE
}

train() { # NAME OPTION...
    local name=$1
    shift
    rm -f "$out/training/$name/summary.json"
    step "$name" program "$bin/fp8" train --device cuda:0 --quiet --report-dir "$out/training/$name" "$@"
    case $simulate" $* " in
    no*" --dtype bf16 "*) gap "$name" judged ;;
    *) gap "$name" printed ;;
    esac
}

# gap NAME judged|printed: how much worse FP8's held-out loss is than that of high precision; judged, 1 % is the most.
gap() {
    local file=$out/training/$1/summary.json percent
    [ -s "$file" ] || return 0 # the training has failed, and says so
    percent=$(awk '/"heldout_loss"/ { inside = 1 } inside && /"high_precision"/ { h = $2 + 0 }
        inside && /"fp8"/ { f = $2 + 0; inside = 0 }
        END { if (h > 0 && f > 0) printf "%+.3f", (f / h - 1) * 100; else print "unknown" }' "$file")
    if [ "$2" = printed ]; then
        echo "$1: held-out loss in FP8 $percent % from high precision's"
    elif awk -v p="$percent" 'BEGIN { exit !(p != "unknown" && p + 0 <= 1) }'; then
        record "$suite" "$1, FP8 beside bf16" passed 0 1 0 0 "held-out loss $percent %, at most +1 %"
    else
        record "$suite" "$1, FP8 beside bf16" failed 0 0 1 0 "held-out loss $percent %, at most +1 %"
    fi
}

suite_smoke() {
    step device program "$bin/gpu_bench" --describe
    step golden tests "$bin/checks" golden --dir "$here/tests/golden" --device cuda:0
    demand golden "device: cuda:0"
    conformance cuda::cells
    conformance cuda::transpose
    conformance cuda::gemm_fp8
}

suite_conformance() { conformance cuda::; }

suite_stress() {
    export FP8_CONFORMANCE_STRESS=1
    if [ $simulate = yes ]; then
        conformance cuda::stress::threads
        skip "stress, the others" "sizes for hardware"
    else
        conformance cuda::stress
    fi
    unset FP8_CONFORMANCE_STRESS
}

suite_recipe() { tests recipe; } # bin/recipe

# By this library's kernels; the suite cudnn has the others.
suite_layers() { # bin/layers
    export FP8_CUDNN=0
    tests layers
    unset FP8_CUDNN
}

suite_cudnn() {
    local reason
    if ! reason=$("$bin/gpu_bench" --cudnn 2>&1); then
        skip all "${reason#error: }"
        return
    fi
    step version program "$bin/gpu_bench" --cudnn
    # It plans each kind of call for about a second.
    cap=$SECTION_LIMIT
    conformance cuda-dnn::
    cap=$LIMIT
    export FP8_CUDNN=1
    tests layers attention
    unset FP8_CUDNN
}

# Its other tests steer the simulated device, wherever they run.
suite_nccl() {
    local file=$out/logs/nccl.txt
    if [ $simulate = yes ]; then names "$bin/nccl"; else names "$bin/nccl" hardware::; fi >"$file"
    case $simulate$libraries in
    no*libnccl*) ;;
    no*) skip all "no libnccl.so.2 found"; return ;;
    esac
    export FP8_TEST_DEVICE=cuda NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    alone "each by itself" "$bin/nccl" "$file"
    unset FP8_TEST_DEVICE
}

suite_training() {
    if [ $simulate = yes ]; then
        local small="--steps 3 --layers 1 --hidden 32 --heads 2 --seq 16 --batch 2 --sample 8"
        train eager $small
        train graph $small --graph --dtype bf16
        train current $small --recipe current
    else
        local large="--dtype bf16 --layers 12 --hidden 768 --heads 12 --seq 512 --batch 8 --steps 300 --lr 3e-4"
        train small
        train graph $large --graph
        train eager $large
        train current $large --graph --recipe current
    fi
}

suite_benchmarks() {
    if [ $simulate = yes ]; then
        step "dry run" program "$bin/gpu_bench" --dry-run
        skip "${SECTIONS// /, }" "a simulated GPU has no speed"
        return
    fi
    rm -f "$out/ours.jsonl"
    local section
    for section in $SECTIONS; do
        timed $SECTION_LIMIT "$section" "$bin/gpu_bench" --section "$section" --out "$out/ours.jsonl"
    done
    export FP8_GEMM_TUNING=8 FP8_GEMM_TUNING_FILE=$out/tuning
    for section in gemm layer; do
        timed $SECTION_LIMIT "$section, tuned" "$bin/gpu_bench" --section "$section" --out "$out/ours.jsonl" \
            --by "fp8-rs tuned"
    done
    unset FP8_GEMM_TUNING FP8_GEMM_TUNING_FILE
}

# ours FILE NAME SECTION [OPTION...]: a section of gpu_bench, into a file of this suite.
ours() {
    local file=$1 name=$2 section=$3
    shift 3
    if [ $simulate = yes ]; then
        step "$name" program "$bin/gpu_bench" --section "$section" --dry-run
    else
        timed $SECTION_LIMIT "$name" "$bin/gpu_bench" --section "$section" --out "$out/$file" "$@"
    fi
}

suite_kernels() {
    local section
    [ $simulate = yes ] || rm -f "$out/ours-kernels.jsonl"
    for section in memory blocks passes attention layer; do
        ours ours-kernels.jsonl "$section" "$section"
    done
}

# The kernels of this library that take most of a layer's time by the estimates of cargo xtask sass, attention by cuDNN or not.
readonly WORST="attention_backward_kv_bf16_128 attention_backward_q_bf16_128 activation_backward_codes_gelu_e4m3 activation_codes_gelu_e4m3 quantize_tiles_bf16_e4m3_sums"

suite_profile() {
    local ncu kernel section name
    # It is there with the toolkit, often outside of PATH.
    export FP8_CUDNN=0
    ncu=$(command -v ncu || ls -d /usr/local/cuda*/bin/ncu /opt/nvidia/nsight-compute/*/ncu 2>/dev/null | tail -n 1)
    for kernel in $WORST; do
        case $kernel in attention*) section=attention ;; *) section=memory ;; esac
        name="ncu $kernel"
        if [ $simulate = yes ]; then
            # What it would profile runs.
            step "$name" program "$bin/gpu_bench" --section $section --dry-run
            demand "$name" "launched $kernel\$"
        elif [ -z "$ncu" ]; then
            skip "$name" "ncu is not installed"
        else
            cap=60
            step "$name" program "$ncu" --target-processes all --kernel-name "$kernel" --launch-count 2 \
                --section SpeedOfLight --section WarpStateStats --section MemoryWorkloadAnalysis --section Occupancy \
                --section InstructionStats --section LaunchStats --page details \
                "$bin/gpu_bench" --section $section --once
            cap=$LIMIT
            demand "$name" " *$kernel "
        fi
    done
    unset FP8_CUDNN
}

# Ours before and after the others: clocks that have fallen meanwhile show.
suite_rivals() {
    local section python=${PYTHON:-python3}
    [ $simulate = yes ] || rm -f "$out/ours-rivals.jsonl" "$out/peers-rivals.jsonl"
    for section in attention layer; do
        ours ours-rivals.jsonl "$section" $section
    done
    if [ $simulate = yes ]; then
        dry_peers attention layer
        return
    fi
    has_torch "$python" || return
    for section in attention layer; do
        timed $SECTION_LIMIT "$section, others" "$python" "$here/bench_peers.py" --section $section --compiled no \
            --out "$out/peers-rivals.jsonl"
    done
    for section in attention layer; do
        ours ours-rivals.jsonl "$section, again" $section --by "fp8-rs again"
    done
}

# The library's first choice and the tuned one, twice each: what the clocks do is not taken for what tuning does.
suite_products() {
    local round
    [ $simulate = yes ] || rm -rf "$out/ours-products.jsonl" "$out/tuning-products"
    ours ours-products.jsonl host host
    for round in "" " again"; do
        ours ours-products.jsonl "gemm$round" gemm --by "fp8-rs$round"
        export FP8_GEMM_TUNING=8 FP8_GEMM_TUNING_FILE=$out/tuning-products
        ours ours-products.jsonl "gemm, tuned$round" gemm --by "fp8-rs tuned$round"
        unset FP8_GEMM_TUNING FP8_GEMM_TUNING_FILE
    done
}

# has_torch PYTHON: or all is skipped.
has_torch() {
    "$1" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null && return
    skip all "$1 has no torch that sees a GPU"
    return 1
}

# dry_peers SECTION...: what would be measured runs on the CPU, in a small size, where torch is.
dry_peers() {
    local section python=${PYTHON:-python3}
    if ! "$python" -c 'import torch' 2>/dev/null; then
        skip "others" "$python has no torch"
        return
    fi
    for section in "$@"; do
        step "$section, others" program "$python" -B "$here/bench_peers.py" --dry-run --section "$section" --compiled no
    done
}

suite_peers() {
    local section python=${PYTHON:-python3}
    if [ $simulate = yes ]; then
        dry_peers $PEERS
        return
    fi
    has_torch "$python" || return
    rm -f "$out/peers.jsonl"
    for section in $PEERS; do
        timed $SECTION_LIMIT "$section" "$python" "$here/bench_peers.py" --section "$section" --compiled no \
            --out "$out/peers.jsonl"
    done
    for section in $COMPILED; do
        timed $LONG_LIMIT "$section, compiled" "$python" "$here/bench_peers.py" --section "$section" --compiled only \
            --out "$out/peers.jsonl"
    done
}

suite_te() {
    local section python=${PYTHON:-python3} found
    if [ $simulate = yes ]; then
        if command -v "$python" >/dev/null 2>&1; then
            step calls program "$python" -B "$here/te_core_check.py"
        else
            skip all "$python is not installed"
        fi
        return
    fi
    has_torch "$python" || return
    rm -f "$out/te.jsonl"
    if ! found=$("$python" "$here/bench_te_core.py" --find 2>&1); then
        skip all "$found"
        return
    fi
    for section in $CORE; do
        timed $LONG_LIMIT "$section" "$python" "$here/bench_te_core.py" --section "$section" --out "$out/te.jsonl"
    done
}

# ---- the run ------------------------------------------------------------------------------------------------------

# Tests read their data from there.
export CARGO_MANIFEST_DIR=$here FP8_CACHE_DIR=${FP8_CACHE_DIR:-$out/cache}
if [ $simulate = yes ]; then
    use_simulator
else
    find_libraries
fi

if ! device=$("$bin/gpu_bench" --describe 2>&1); then
    die "no GPU to test: ${device#error: }; --simulate runs everything on the simulated GPU"
fi
case $simulate$device in
no*simulated*) die "FP8_CUDA_LIB_DIR leads to the simulated GPU; unset it, or name --simulate" ;;
esac
dnn=$("$bin/gpu_bench" --cudnn 2>&1) || dnn="attention without cuDNN: ${dnn#error: }"
libraries=$libraries$dnn$'\n'
gpu=$(command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi \
    --query-gpu=name,driver_version,compute_cap,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit \
    --format=csv 2>&1) || gpu="nvidia-smi: not there, or no answer"
printf '%s\n%s\n%s%s\n' "$device" "$gpu" "$libraries" "$(uname -sr), $(nproc) cores"
if [ $simulate = no ] && command -v "${PYTHON:-python3}" >/dev/null 2>&1; then
    "${PYTHON:-python3}" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)' 2>/dev/null
fi

cd "$out" || exit 1
# Not those of the other kind of device, nor a line that was cut off.
keep -E "^[{].*\"simulated\": $simulated(,.*)?[}]\$"
for suite in $suites; do
    suite_start=$SECONDS
    keep -v "^{\"suite\": \"$suite\","
    echo "==== $suite"
    "suite_$suite"
    write_results
done
echo
printf '%s\n' "${rows[@]}" | table
echo "$failed failed; results in $out/results.json and $out/results.md"
[ $failed -eq 0 ]
