"""vNPUs are parts of an NPU that `npu-smi set -t create-vnpu` makes. Each is a device with its own id.

The driver numbers the vNPUs of NPU k from 100 + 16 * k on. A vNPU is /dev/vdavinciN on the host and /dev/davinciN in a
container that mounts it. It has no address, and HCCL does not connect vNPUs. An instance with a vNPU therefore has only
this device, and its `device_ip` is the host's address, from which workers conclude that there is no HCCL. Sources:
hiascend.com, the virtualization guide (creating and mounting vNPUs) and HCCL's constraints. Knows nothing of tables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from ranktable_tools.errors import MISSING, RankTableError

DEV: Final = Path("/dev")
FILES: Final = "vdavinci[0-9]*"  # the device files on the host, in DEV
_FIRST: Final = 100
_OF_ONE_NPU: Final = 16
_ID: Final = re.compile(r"v?davinci([0-9]+)")


def is_vnpu(device_id: int) -> bool:
    return device_id >= _FIRST


def npu_of(device_id: int) -> int:
    """Returns the id of the NPU that contains this vNPU."""
    return (device_id - _FIRST) // _OF_ONE_NPU


def present(dev: Path | None = None) -> list[int]:
    """Returns the ids of the vNPUs that have a device file on this machine."""
    folder = dev or DEV
    found = {int(each[1]) for file in folder.glob("*davinci*") if (each := _ID.fullmatch(file.name))}
    return sorted(filter(is_vnpu, found))


def refuse_split(instances: Mapping[str, Sequence[int]]) -> None:
    """Refuses an instance with several devices of which one is a vNPU, and an NPU that is used as a whole and in part.

    `instances`: option and entry -> device ids. Raises RankTableError.
    """
    whole = {device_id: place for place, ids in instances.items() for device_id in ids if not is_vnpu(device_id)}
    for place, ids in instances.items():
        for device_id in filter(is_vnpu, ids):
            if len(ids) > 1:
                expected = f"one device, as {device_id} is a vNPU and HCCL does not connect vNPUs"
                raise RankTableError("gen", place, ",".join(map(str, ids)), expected, "or whole NPUs, such as 4,5")
            npu = npu_of(device_id)
            if npu in whole:
                expected = f"a vNPU of an NPU that no instance uses as a whole ({whole[npu]} has NPU {npu})"
                raise RankTableError("gen", place, device_id, expected)


def addresses(device_ids: Sequence[int], given: Mapping[int, str], host: str) -> dict[int, str]:
    """Returns each vNPU's address, which is the given one or the host's. Raises RankTableError for a missing vNPU."""
    here = present()
    for device_id in device_ids:
        if device_id not in given and device_id not in here:
            raise _not_there(device_id, here, host)
    return {device_id: given.get(device_id, host) for device_id in device_ids}


def _not_there(device_id: int, here: Collection[int], host: str) -> RankTableError:
    seen = f"existing ones are {', '.join(map(str, here))}" if here else "none exists"
    return RankTableError(
        str(DEV / f"vdavinci{device_id}"),
        f"vNPU {device_id}",
        MISSING,
        f"the device file of a vNPU ({seen}; ids below {_FIRST} are whole NPUs)",
        f"make one with npu-smi set -t create-vnpu -i {npu_of(device_id)} -c 0, or give --device-ip {device_id}={host} "
        "for one that this container cannot see",
    )
