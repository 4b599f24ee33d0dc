"""A user's script without `if __name__ == "__main__"`: python offline_script.py MODEL NUM_PREFILL HOW_IT_ENDS.

Prints the pids of its child processes on one line, then ends as HOW_IT_ENDS says.
"""

import os
import signal
import sys
import time

from pd_cluster.offline.offline_service import OfflineConfig, OfflineService
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.settings.engine_config import EngineConfig
from tests.support.cluster import children_of

model, number, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
offline = OfflineService(OfflineConfig(engine=EngineConfig(model=model, num_blocks=64), prefill=number, decode=number))


async def answer(max_tokens: int) -> str:
    request = CompletionRequest(prompt="hello", max_tokens=max_tokens, ignore_eos=True, temperature=0)
    (piece,) = await offline.service.complete(await offline.service.completions(request))
    return piece.text


text = offline.run(answer(4))
started = children_of(os.getpid())  # the preloader and two workers' parents
print(*started, *(pid for each in started for pid in children_of(each)), flush=True)
if how == "exception":
    raise ValueError("an error of the user's script")
if how == "interrupt":
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    while True:
        offline.run(answer(400))
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "close":
    offline.close()
    offline.close()
    time.sleep(0)
