#!/bin/sh
# gpu_status.sh SOURCE_ID: prints one word. fresh: a GPU record of these sources is in bench/results; stale: only of
# others; none: there is no GPU record.
set -u
if [ $# != 1 ] || [ -z "$1" ]; then
  echo 'gpu_status.sh: give the source id to look for, or use make gpu-record-status' >&2
  exit 1
fi
cd "$(dirname "$0")/.." || exit 1
word=none
for record in bench/results/*/gpu.jsonl; do
  [ -f "$record" ] || continue
  [ "$word" = fresh ] || word=stale
  # A record is of one build: records.py refuses any other.
  ! sed -n 1p "$record" | grep -q "\"source_id\":\"$1\"" || word=fresh
done
echo $word
