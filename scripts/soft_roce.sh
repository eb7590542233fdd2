#!/usr/bin/env bash
# Run the ucx transport's contract tests over RDMA verbs without an RDMA device: in a small virtual machine whose kernel
# makes one of its Ethernet card (soft-RoCE, rdma_rxe). It proves that the verbs path works, and says nothing about speed.
#
#   scripts/soft_roce.sh                        the contract tests that use ucx
#   scripts/soft_roce.sh 'COMMAND'              another command, run in the sources' folder
#
# For Debian 12 with qemu-system-x86_64. Everything else (kernel, verbs, UCX with verbs and its headers) is taken out of
# Debian's packages into a folder of its own, $KVFERRY_SOFT_ROCE_DIR, and lies over this machine's files inside the
# virtual machine only; it sees them read-only. ACCEL=kvm is far faster where the processor can do that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SOURCES=$PWD
PYTHON=${PYTHON:-$SOURCES/.venv/bin/python}
FOLDER=${KVFERRY_SOFT_ROCE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvferry/soft-roce}
MINUTES=${MINUTES:-20}
ACCEL=${ACCEL:-tcg,thread=multi}
COMMAND=${1:-"$PYTHON -m pytest -p no:cacheprovider -m ucx -k 'not tcp' tests/contract"}
PACKAGES="libucx0 libucx-dev libibverbs1 ibverbs-providers ibverbs-utils librdmacm1 libnl-3-200 libnl-route-3-200
libnuma1 iproute2 libbpf1 libelf1 libmnl0 busybox-static kmod cpio"
MODULES="virtio_pci virtio_net 9p 9pnet_virtio overlay crc32_generic ib_uverbs rdma_ucm rdma_rxe"

say() { printf 'soft-RoCE: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

# Debian's packages, unpacked and not installed.
fetch() {
    local kernel
    [ -e "$FOLDER/fetched" ] && return
    kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ {print $2; exit}')
    [ -n "$kernel" ] || fail "apt knows no linux-image-amd64; is this Debian, and has apt-get update been run?"
    say "fetching $kernel and UCX with verbs into $FOLDER"
    rm -rf "$FOLDER"
    mkdir -p "$FOLDER/packages" "$FOLDER/kernel" "$FOLDER/over"
    # shellcheck disable=SC2086 -- a list
    (cd "$FOLDER/packages" && apt-get -qq -o APT::Sandbox::User=root download "$kernel" $PACKAGES)
    for package in "$FOLDER"/packages/*.deb; do
        case $package in
        */linux-image-*) dpkg-deb -x "$package" "$FOLDER/kernel" ;;
        *) dpkg-deb -x "$package" "$FOLDER/over" ;;
        esac
    done
    # Where these are links on the machine, a folder would hide what is behind them.
    for folder in bin sbin lib; do
        if [ -d "$FOLDER/over/$folder" ]; then
            mkdir -p "$FOLDER/over/usr/$folder"
            cp -a "$FOLDER/over/$folder/." "$FOLDER/over/usr/$folder/"
            rm -r "${FOLDER:?}/over/$folder"
        fi
    done
    rm -r "$FOLDER/packages"
    touch "$FOLDER/fetched"
}

# The first root: a shell, the modules in the order they depend on each other, and the way to the second root.
pack() {
    local root=$FOLDER/first kmod=$FOLDER/over/usr/bin/kmod release
    release=$(basename "$FOLDER"/kernel/lib/modules/*)
    rm -rf "$root"
    mkdir -p "$root"/{bin,modules,proc,sys,dev,host,over,room,root}
    cp "$FOLDER/over/usr/bin/busybox" "$root/bin/busybox"
    ln -s busybox "$root/bin/sh"
    ln -sf kmod "$FOLDER/over/usr/bin/depmod"
    ln -sf kmod "$FOLDER/over/usr/bin/modprobe"
    "$FOLDER/over/usr/bin/depmod" -b "$FOLDER/kernel" "$release"
    for module in $MODULES; do
        "$FOLDER/over/usr/bin/modprobe" -d "$FOLDER/kernel" -S "$release" --show-depends "$module"
    done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' >"$FOLDER/modules"
    while read -r module; do
        cp "$module" "$root/modules/"
        basename "$module"
    done <"$FOLDER/modules" >"$root/modules/order"
    cat >"$root/init" <<'INIT'
#!/bin/sh
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev
while read -r module; do
    busybox insmod "/modules/$module" || echo "soft-RoCE: no module $module"
done </modules/order
options=trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro
busybox mount -t 9p -o $options host /host
busybox mount -t 9p -o $options over /over
busybox mount -t tmpfs room /room
busybox mkdir /room/new /room/work
busybox mount -t overlay -o lowerdir=/over:/host,upperdir=/room/new,workdir=/room/work root /root
for folder in proc sys dev; do busybox mount --move /$folder /root/$folder; done
busybox mkdir -p /root/dev/shm
busybox mount -t tmpfs shm /root/dev/shm
busybox mount -t tmpfs run /root/run
busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro order /root/mnt
busybox chroot /root /bin/bash /mnt/order.sh
busybox poweroff -f
INIT
    chmod +x "$root/init"
    (cd "$root" && find . | "$FOLDER/over/usr/bin/cpio" -o -H newc --quiet | gzip -1) >"$FOLDER/first.gz"
}

# What runs in the second root.
order() {
    cat >"$1/order.sh" <<ORDER
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 PYTHONPATH=$(printf %q "$SOURCES")
export UCX_TLS=rc UCX_NET_DEVICES=rxe0:1 UCX_IB_GID_INDEX=0
ulimit -l unlimited
cd $(printf %q "$SOURCES")
ldconfig
ip link set lo up
card=\$(ls /sys/class/net | grep -v lo | head -1)
ip address add 10.78.0.1/24 dev "\$card"
ip link set "\$card" up
rdma link add rxe0 type rxe netdev "\$card"
rdma link show
uname -r
$(printf %q "$PYTHON") -c 'from kv_transfer.ucx import describe; print(describe())'
$COMMAND
echo "soft-RoCE: ended with \$?"
ORDER
}

command -v qemu-system-x86_64 >/dev/null || fail "qemu-system-x86_64 is missing (Debian: qemu-system-x86)"
[ -x "$PYTHON" ] || fail "no $PYTHON; make the environment first, or name one with PYTHON"
fetch
pack
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
order "$scratch"
share() { printf 'local,path=%s,mount_tag=%s,security_model=none,readonly=on,multidevs=remap' "$1" "$2"; }
say "booting"
timeout "$((MINUTES * 60))" qemu-system-x86_64 -machine q35 -accel "$ACCEL" -cpu max -smp 2 -m 4096 \
    -kernel "$FOLDER"/kernel/boot/vmlinuz-* -initrd "$FOLDER/first.gz" -append "console=ttyS0 panic=-1 no_timer_check quiet" \
    -display none -monitor none -serial stdio -no-reboot -nic user,model=virtio-net-pci,restrict=on \
    -virtfs "$(share / host)" -virtfs "$(share "$FOLDER/over" over)" -virtfs "$(share "$scratch" order)" \
    </dev/null | stdbuf -oL tr -d '\r' | tee "$scratch/log"
grep -q '^soft-RoCE: ended with 0$' "$scratch/log"
