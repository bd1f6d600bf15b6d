#!/bin/sh
# bare_machine.sh: `make run` and `make test` on a bare machine: a fresh minimal Debian of this Debian's release in a
# folder, with gcc, make and git, into which the committed tree is cloned. Prints what each of the two took, in seconds
# and in CPU seconds. Needs root, debootstrap, and apt's sources on this machine.
#
#   sudo sh scripts/bare_machine.sh [DIR]      DIR: a new folder; a temporary one, which is removed, unless given
#
# MIRROR=URL and SUITE=name take another mirror or release; STEPS='run' leaves the tests out.
# Fails where one of them fails, or where `make run` takes longer than RUN_LIMIT seconds (75).
set -u
cd "$(dirname "$0")/.." || exit 1
die() {
  echo "bare_machine.sh: $*" >&2
  exit 1
}
[ "$(id -u)" = 0 ] || die 'needs root, to make a root file system and change into it'
command -v debootstrap >/dev/null || die 'needs debootstrap (apt-get install debootstrap)'

# Of apt's sources the first of this release, in either of their formats.
SUITE=${SUITE:-$(. /etc/os-release && echo "${VERSION_CODENAME:-}")}
[ -n "$SUITE" ] || die 'this system names no release: give SUITE'
MIRROR=${MIRROR:-$(apt-get indextargets --format '$(RELEASE) $(SITE) $(REPO_URI)' 'Created-By: Packages' | awk -v suite="$SUITE" '$1 == suite { print $3; exit }')}
[ -n "$MIRROR" ] || die "apt's sources have no $SUITE: give MIRROR"

if [ $# -gt 0 ]; then
  [ ! -e "$1" ] || die "$1: is there already"
  mkdir -p "$1" || exit 1
  root=$(cd "$1" && pwd) kept=yes
else
  root=$(mktemp -d) kept=
  chmod 755 "$root" # / of the bare machine: other users than root may see what is in it
fi

# Nothing is removed as long as anything is mounted below it.
leave() {
  rm -f "$root.log"
  for part in dev proc; do
    ! mountpoint -q "$root/$part" || umount "$root/$part" || umount -l "$root/$part"
  done
  if [ -z "$kept" ]; then
    if grep -q " $root/" /proc/mounts; then
      echo "bare_machine.sh: $root has mounts: not removed" >&2
    else
      rm -rf --one-file-system "$root"
    fi
  fi
}
trap leave EXIT
trap 'exit 130' INT TERM HUP

echo "== $SUITE from apt's mirror in $root"
debootstrap --variant=minbase --include=gcc,make,git,ca-certificates "$SUITE" "$root" "$MIRROR" >"$root.log" 2>&1 ||
  { tail -n 20 "$root.log" && die 'debootstrap failed'; }
mount --bind /dev "$root/dev" && mount -t proc proc "$root/proc" || die 'cannot mount /dev and /proc'
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
apt-config dump Acquire >"$root/etc/apt/apt.conf.d/90here" # proxies and the like
git clone -q --no-local . "$root/esmm" || die 'cannot clone the tree'

status=0
# step SECONDS COMMAND: on two cores, with none of this machine's settings; the log is shown where it fails.
step() {
  step_limit=$1
  shift
  taskset -c 0,1 env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LC_ALL=C chroot "$root" bash -c \
    "cd /esmm && TIMEFORMAT='%R %U %S' && time $* >/log 2>&1" >"$root/times" 2>&1
  step_status=$?
  step_times=$(tail -n 1 "$root/times")
  echo "$step_times" | awk -v what="$*" '{ printf "%-12s %.0f s, %.0f s of CPU\n", what, $1, $2 + $3 }'
  tail -n 1 "$root/log"
  [ $step_status = 0 ] || { tail -n 60 "$root/log" && echo "FAILED: $* ended with status $step_status" && status=1; }
  [ "${step_times%%.*}" -le "$step_limit" ] || { echo "FAILED: $* may take $step_limit s" && status=1; }
}
for what in ${STEPS:-run test}; do
  if [ "$what" = run ]; then step "${RUN_LIMIT:-75}" make run; else step 86400 make "$what"; fi
done
exit $status
