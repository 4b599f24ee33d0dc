#!/bin/sh
# Builds a container image from a base image, for NPUs by default. Works from any folder.
#
#   sh build_image.sh --base-image=IMAGE --image-name=NAME [OPTIONS]
#
#   --device=npu|cuda|cpu       default: npu. The base image must have CANN for npu, CUDA for cuda, and Python 3.11 or
#                               newer with pip; cpu needs no --base-image
#   --torch-index-url=URL       an index with the right builds of torch; for npu and cpu, builds without CUDA
#   --device-gid=GID            npu: the group of /dev/davinci0 on the host (stat -c %g /dev/davinci0); default: 1000
#   --dry-run                   print the command and end
#
# $DOCKER: a program to run in place of docker.

set -eu

fail() {
    echo "build_image.sh: $*" >&2
    exit 2
}

base_image='' image_name='' device=npu torch_index_url='' device_gid='' dry_run=''
while [ $# -gt 0 ]; do
    name=${1%%=*}
    case $name in
    -h | --help)
        sed -n '2,13s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --dry-run)
        [ "$1" = "$name" ] || fail "--dry-run takes no value"
        dry_run=yes
        shift
        continue
        ;;
    --base-image | --image-name | --device | --torch-index-url | --device-gid) ;;
    *) fail "unknown option $name; there are --base-image, --image-name, --device, --torch-index-url, --device-gid, --dry-run" ;;
    esac
    if [ "$1" = "$name" ]; then # --name value
        [ $# -ge 2 ] || fail "$name needs a value: $name=VALUE"
        shift
        value=$1
    else
        value=${1#*=}
    fi
    case $value in
    '' | -*) fail "$name needs a value: $name=VALUE" ;;
    esac
    case $name in
    --base-image) base_image=$value ;;
    --image-name) image_name=$value ;;
    --device) device=$value ;;
    --torch-index-url) torch_index_url=$value ;;
    --device-gid) device_gid=$value ;;
    esac
    shift
done

case $device in
npu | cuda | cpu) ;;
*) fail "--device=$device: expected npu, cuda or cpu" ;;
esac
[ -n "$image_name" ] || fail "--image-name is missing: the name that the new image gets"
[ -n "$base_image" ] || [ "$device" = cpu ] || fail "--base-image is missing: for $device, the image to build on"
[ -z "$device_gid" ] || [ "$device" = npu ] || fail "--device-gid is for --device=npu"

self=$(readlink -f -- "$0" 2>/dev/null) || self=$0
root=$(CDPATH='' cd -- "$(dirname -- "$self")/.." && pwd -P)
docker=${DOCKER:-docker}

set -- build -f "$root/deploy/Dockerfile.$device" -t "$image_name"
[ -z "$base_image" ] || set -- "$@" --build-arg "BASE_IMAGE=$base_image"
[ -z "$torch_index_url" ] || set -- "$@" --build-arg "TORCH_INDEX_URL=$torch_index_url"
[ -z "$device_gid" ] || set -- "$@" --build-arg "DEVICE_GID=$device_gid"
set -- "$docker" "$@" "$root"

if [ -n "$dry_run" ]; then
    echo "$*"
    exit 0
fi
command -v "$docker" >/dev/null 2>&1 ||
    fail "$docker is not installed or not on PATH; install it, or name another program: DOCKER=podman sh build_image.sh …"
export DOCKER_BUILDKIT=1 # only BuildKit reads Dockerfile.$device.dockerignore
exec "$@"
