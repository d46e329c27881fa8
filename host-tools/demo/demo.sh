#!/usr/bin/env bash
# The whole of Sluice in under three minutes, on this machine: service up, real data offloaded through NVMe/TCP and read
# back, the service killed under load, host and offload compared, members destroyed, service down. Every command is shown;
# every claim is checked, and the exit code is 0 only if all of them held.
#
#   host-tools/demo/demo.sh [FOLDER]     FOLDER: what to store (default: this repository's own files)
#
# SLUICE_BIN names the folder of the binaries (default target/release), SLUICE_DEMO_KEEP=1 keeps the files.
set -u -o pipefail

REPO=$(cd "$(dirname "$0")/../.." && pwd)
BIN=${SLUICE_BIN:-$REPO/target/release}
FOLDER=${1:-$REPO}
WORK=$(mktemp -d "${TMPDIR:-/tmp}/sluice-demo.XXXXXX")
CONFIG=$WORK/demo.toml
SOCKET=$WORK/control.sock
NQN=nqn.2026-11.io.sluice:dev
PLAIN_BYTES=536870912
PORT=
SERVICE=
LOAD=
PASSED=0
FAILED=0
STARTED=$SECONDS

bold() { if [ -t 1 ]; then printf '\033[1m%s\033[0m\n' "$*"; else printf '%s\n' "$*"; fi; }
step() { printf '\n'; bold "── $*"; }
pass() { PASSED=$((PASSED + 1)); bold "PASS  $*"; }
fail() { FAILED=$((FAILED + 1)); bold "FAIL  $*"; }
# check TEXT COMMAND...: PASS or FAIL by the command's exit code.
check() { local text=$1; shift; if "$@"; then pass "$text"; else fail "$text"; fi; }
# show COMMAND...: prints the command as one would type it, then runs it.
show() {
    local words=() word
    for word in "$@"; do
        case $word in
            "$BIN"/*) word=${word##*/} ;;
        esac
        words+=("$word")
    done
    printf '$ %s\n' "${words[*]}"
    "$@"
}
say() { printf '$ %s\n' "$*"; }
# number FILE KEY: the first number of that key in a JSON file.
number() { grep -o "\"$2\": *-\?[0-9.]*" "$1" | head -n 1 | sed 's/.*: *//'; }
# ratio A B: A/B with two digits; less A B: A < B.
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { if (b > 0) printf "%.2f", a / b; else print "-" }'; }
less() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a < b) }'; }

at() { printf '%s' "-t tcp -a 127.0.0.1 -s $PORT -n $NQN"; }
# Word splitting of `at` is wanted: it is a list of options.
# shellcheck disable=SC2046
nvmf() { show "$BIN/nvmf" "$1" $(at) "${@:2}"; }
ctl() { "$BIN/offloadctl" --socket "$SOCKET" "$@"; }

stop_own() {
    local pid
    for pid in $LOAD $SERVICE; do
        if kill -0 "$pid" 2>/dev/null; then kill -9 "$pid" 2>/dev/null; wait "$pid" 2>/dev/null; fi
    done
}
finish() {
    local code=$?
    stop_own
    if [ "$FAILED" -gt 0 ] || [ "$code" -ne 0 ]; then
        printf '\nlast lines of the service (%s):\n' "$WORK/service.log"
        tail -n 25 "$WORK/service.log" 2>/dev/null
        printf 'files kept in %s\n' "$WORK"
    elif [ -z "${SLUICE_DEMO_KEEP:-}" ]; then
        rm -rf "$WORK"
    else
        printf 'files kept in %s\n' "$WORK"
    fi
}
trap finish EXIT
trap 'exit 130' INT TERM
give_up() { fail "$*"; exit 1; }

listening() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
free_port() {
    local port
    for port in $(seq 4420 4520); do
        if ! listening "$port"; then printf '%s' "$port"; return 0; fi
    done
    return 1
}

write_config() {
    local i
    sed -e "s|\"var/|\"$WORK/|; s|:var/|:$WORK/|; s|^port = 4420|port = $PORT|" "$REPO/configs/dev.toml" |
        awk -v work="$WORK" '
            { print }
            /^backend = "pool:vol0"/ {
                for (i = 0; i < 6; i++)
                    printf "\n[[subsystem.namespace]]\nnsid = %d\nbackend = \"file:%s/plain-%d\"\nblock_size = 4096\n", i + 2, work, i
                print "\n[[subsystem.namespace]]\nnsid = 8\nbackend = \"pool:bench\""
            }
            /^name = "vol0"/ { seen = 1 }
            seen && /^cipher/ { print "\n[[volume]]\nname = \"bench\"\nsize = \"2GiB\""; seen = 0 }
        ' >"$CONFIG"
    for i in 0 1 2 3 4 5; do truncate -s "$PLAIN_BYTES" "$WORK/plain-$i"; done
}

# Starts the service and waits until it serves; sets SERVICE and READY_MS.
start_service() {
    local begin
    begin=$(date +%s%N)
    say "offload-svc --config $CONFIG &"
    "$BIN/offload-svc" --config "$CONFIG" >>"$WORK/service.out" 2>>"$WORK/service.log" &
    SERVICE=$!
    until listening "$PORT"; do
        kill -0 "$SERVICE" 2>/dev/null || give_up "the service ended at its start"
        [ $((($(date +%s%N) - begin) / 1000000)) -lt 60000 ] || give_up "the service doesn't listen after 60 s"
        sleep 0.05
    done
    # shellcheck disable=SC2046
    "$BIN/nvmf" read $(at) -z 4096 -d /dev/null 2>/dev/null || give_up "the service doesn't serve the first read"
    READY_MS=$((($(date +%s%N) - begin) / 1000000))
}

pool_json() { ctl --json pool show >"$WORK/pool.json"; }
volume_json() { ctl --json volume list >"$WORK/volumes.json"; }
# What volume vol0 stores and takes: sets USED and STORED.
volume_use() {
    volume_json || return 1
    tr -d '\n' <"$WORK/volumes.json" | grep -o '{[^{}]*"name": *"vol0"[^{}]*}' >"$WORK/vol0.json"
    USED=$(number "$WORK/vol0.json" used_bytes)
    STORED=$(number "$WORK/vol0.json" stored_bytes)
}
in_members() { grep -l -a -F -- "$1" "$WORK"/member-* 2>/dev/null; }

for program in offload-svc offloadctl nvmf offload-bench; do
    [ -x "$BIN/$program" ] || give_up "$BIN/$program isn't there: make build"
done
PORT=$(free_port) || give_up "no free port between 4420 and 4520"

step "1. Service up: a 4+2 pool of files, lz4, aes-256-gcm, on 127.0.0.1:$PORT"
write_config
check "the configuration is valid and its memory plan fits" show "$BIN/offload-svc" --config "$CONFIG" --check
start_service
cat "$WORK/service.out"
check "it said in one line how to attach" grep -q "nvme connect" "$WORK/service.out"
check "the key file is readable by its owner only" [ "$(stat -c %a "$WORK/pool.key")" = 600 ]

step "2. Host attached, from user space"
discovers() {
    show "$BIN/nvmf" discover -t tcp -a 127.0.0.1 -s "$PORT" | tee "$WORK/discover.txt"
    grep -q -F "subnqn:  $NQN" "$WORK/discover.txt"
}
check "discovery lists the subsystem" discovers
check "identify shows the volume" nvmf identify --namespace-id 1

step "3. Real data: $FOLDER written and read back"
say "tar -C $FOLDER --exclude=./target --exclude=./.git -cf $WORK/folder.tar ."
tar -C "$FOLDER" --exclude=./target --exclude=./.git --exclude=./var --exclude=./shared -cf "$WORK/folder.tar" . ||
    give_up "tar failed"
SIZE=$(stat -c %s "$WORK/folder.tar")
check "written: $SIZE bytes" nvmf write --offset 12345 -d "$WORK/folder.tar"
check "read back" nvmf read --offset 12345 -z "$SIZE" -d "$WORK/back.tar"
check "identical, byte for byte" cmp "$WORK/folder.tar" "$WORK/back.tar"
mkdir "$WORK/unpacked"
tar -C "$WORK/unpacked" -xf "$WORK/back.tar"
check "unpacked, the folder is the same" diff -rq --no-dereference --exclude=target --exclude=.git --exclude=var \
    --exclude=shared "$FOLDER" "$WORK/unpacked"
volume_use && printf 'at rest: %s bytes of the folder take %s bytes as records (%s per byte), before parity\n' \
    "$USED" "$STORED" "$(ratio "$STORED" "$USED")"
check "compression pays: records take less than the data" less "$STORED" "$USED"
USED_TEXT=$USED STORED_TEXT=$STORED
head -c 33554432 /dev/urandom >"$WORK/random"
check "32 MiB of random bytes written" nvmf write --offset 256MiB -d "$WORK/random"
volume_use
RANDOM_RATIO=$(ratio $((STORED - STORED_TEXT)) $((USED - USED_TEXT)))
printf 'at rest: random bytes take %s per byte as records\n' "$RANDOM_RATIO"
check "what can't be compressed is stored raw: at most 2 % on top" less "$RANDOM_RATIO" 1.021
pool_json && printf 'at rest, headers and parity included: %s bytes per byte of the user'"'"'s\n' \
    "$(number "$WORK/pool.json" rest_bytes_per_user_byte)"

step "4. No plaintext at rest"
CANARY="sluice-canary-$$-$RANDOM$RANDOM-no-member-may-hold-this-text"
for _ in $(seq 20000); do printf '%s\n' "$CANARY"; done >"$WORK/canary"
check "a known text written through the pool" nvmf write --offset 512MiB -d "$WORK/canary"
check "the same text to a plain namespace, to prove that the search would find it" \
    nvmf write --namespace-id 2 -d "$WORK/canary"
say "grep -l -a -F '$CANARY' member-* plain-0"
check "found in the plain namespace's file" grep -q -a -F -- "$CANARY" "$WORK/plain-0"
nowhere_in_members() { ! in_members "$CANARY"; }
check "found in no member of the pool" nowhere_in_members

step "5. kill -9 in the middle of a load"
say "nvmf verify $(at) --start-block 262144 --size 64MiB -i 2 --journal load.journal --zeroes-percent 5 --deallocate-percent 5 &"
# shellcheck disable=SC2046
"$BIN/nvmf" verify $(at) --start-block 262144 --size 64MiB -i 2 --journal "$WORK/load.journal" \
    --zeroes-percent 5 --deallocate-percent 5 >"$WORK/load.txt" 2>&1 &
LOAD=$!
sleep 4
say "kill -9 $SERVICE"
kill -9 "$SERVICE"
wait "$SERVICE" 2>/dev/null
wait "$LOAD"
LOAD_CODE=$?
LOAD=
cat "$WORK/load.txt"
check "the host saw the connection break" [ "$LOAD_CODE" -eq 3 ]
start_service
printf 'first I/O %s ms after the restart\n' "$READY_MS"
pool_json
grep -o '"summary": *"[^"]*"' "$WORK/pool.json" | sed 's/"summary": *//'
check "every acknowledged write is there, nothing is torn or stale" \
    nvmf verify --start-block 262144 --size 64MiB --check-journal "$WORK/load.journal"
check "and again: what was read once doesn't revert" \
    nvmf verify --start-block 262144 --size 64MiB --check-journal "$WORK/load.journal"
nvmf read --offset 12345 -z "$SIZE" -d "$WORK/back.tar"
check "the folder is still identical" cmp "$WORK/folder.tar" "$WORK/back.tar"

step "6. Host-side processing against offloading"
# shellcheck disable=SC2046
check "both ways verified every byte" show "$BIN/offload-bench" compare $(at) --pool-namespace 8 --member-namespaces 2-7 \
    --socket "$SOCKET" --size 32MiB --rounds 3 --json "$WORK/compare.json"

step "7. Two of six members destroyed while serving"
say "truncate -s 0 member-1; dd if=/dev/urandom of=member-4 (all of it)"
truncate -s 0 "$WORK/member-1"
MEMBER_BYTES=$(stat -c %s "$WORK/member-4")
# The member is sparse: only where it holds something is there something to destroy. It ends within its first half here.
head -c $((MEMBER_BYTES / 2)) /dev/urandom | dd of="$WORK/member-4" bs=1M conv=notrunc,fsync status=none iflag=fullblock
nvmf read --offset 12345 -z "$SIZE" -d "$WORK/back.tar"
check "the folder is still identical" cmp "$WORK/folder.tar" "$WORK/back.tar"
nvmf read --offset 256MiB -z 33554432 -d "$WORK/random.back"
check "the random bytes too" cmp "$WORK/random" "$WORK/random.back"
check "writes go on, verified" nvmf verify --start-block 393216 --size 16MiB --seed 7
check "every journalled write is still there" \
    nvmf verify --start-block 262144 --size 64MiB --check-journal "$WORK/load.journal"
show "$BIN/offloadctl" --socket "$SOCKET" pool show
pool_json
tr -d '\n' <"$WORK/pool.json" | grep -o '{[^{}]*"checksum_errors"[^{}]*}' >"$WORK/members.txt"
damaged() {
    sed -n "$(($1 + 1))p" "$WORK/members.txt" >"$WORK/member.json"
    local sum=0 key value
    for key in read_errors write_errors timeouts checksum_errors repaired; do
        value=$(number "$WORK/member.json" $key)
        sum=$((sum + ${value:-0}))
    done
    [ "$sum" -gt 0 ] || ! grep -q '"state": *"active"' "$WORK/member.json"
}
check "pool show names the damage of member 1" damaged 1
check "pool show names the damage of member 4" damaged 4
sound() { ! damaged "$1"; }
for member in 0 2 3 5; do check "and none of member $member" sound "$member"; done

step "8. Service down"
say "kill -TERM $SERVICE"
kill -TERM "$SERVICE"
wait "$SERVICE"
CODE=$?
SERVICE=
check "it drained, flushed and ended with code 0" [ "$CODE" -eq 0 ]
closed() { ! listening "$PORT"; }
check "nothing listens any more" closed

printf '\n'
bold "$PASSED passed, $FAILED failed, $((SECONDS - STARTED)) s"
[ "$FAILED" -eq 0 ]
