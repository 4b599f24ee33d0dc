"""`pd-cluster status`: shows the cluster's problems; exit code 1 if requests suffer."""

from __future__ import annotations

import asyncio
import json

from pd_cluster.client.admin_client import Admin
from pd_cluster.client.instance_list import print_instances
from pd_cluster.client.overview_reader import FINE, Found, fetch_overview, figures, is_critical


def run(admin: Admin, as_json: bool) -> int:
    """Returns the exit code: 1 if a problem is critical. Raises PdClusterError if no scheduler answers."""
    found = asyncio.run(fetch_overview(admin))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(admin.url, found)
    return int(is_critical(found))


def show(url: str, found: Found) -> None:
    for line in problem_lines(found):
        print(line)
    print(", ".join(f"{name} {value}" for name, value in figures(found).items()))
    print()
    print_instances(url, found["instances"])


def problem_lines(found: Found) -> list[str]:
    if not found["problems"]:
        return [FINE]
    return [f"{each['severity'].upper()}: {each['text']}; {each['way_out']}" for each in found["problems"]]
