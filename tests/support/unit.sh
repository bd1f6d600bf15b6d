#!/bin/sh
# unit.sh: one build or one test program of run_tests.sh. LOG is the folder of what it leaves: NAME.log, and NAME.done with
# its status and seconds.
#
#   unit.sh NAME BUILD COMMAND...    a test is not run where its build has failed; - for none
set -u
name=$1 build=$2
shift 2
case $name in
build_*) ;;
*)
  if [ "$build" != - ] && ! grep -q '^0 ' "$LOG/build_$build.done"; then
    echo 'unbuilt 0' >"$LOG/$name.done"
    exit 0
  fi
  unset MAKEFLAGS MFLAGS MAKELEVEL # the job server of the builds is not the tests'
  export XDG_CACHE_HOME="$LOG/../work/cache/$name"
  mkdir -p "$XDG_CACHE_HOME"
  set -- timeout 900 "$@"
  ;;
esac
began=$(date +%s)
"$@" >"$LOG/$name.log" 2>&1 </dev/null
echo "$? $(($(date +%s) - began))" >"$LOG/$name.tmp"
mv "$LOG/$name.tmp" "$LOG/$name.done"
