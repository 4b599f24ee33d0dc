"""openai-agents, unmodified: an agent that calls a tool, over /v1/responses and over chat, whole and streamed.

`python ask_openai_agents.py URL` prints what it saw as JSON.
"""

import asyncio
import json
import sys

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

ASKED = []


@function_tool
def get_sum(a: int, b: int) -> str:
    """Adds two numbers."""
    ASKED.append([a, b])
    return str(a + b)


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    found = {}
    for name, kind in (("responses", OpenAIResponsesModel), ("chat", OpenAIChatCompletionsModel)):
        settings = ModelSettings(temperature=0, max_tokens=100)
        model = kind(model="tiny", openai_client=client)
        agent = Agent(name="adder", instructions="Add.", model=model, tools=[get_sum], model_settings=settings)
        whole = await Runner.run(agent, "What is 3 + 4?")
        streamed = Runner.run_streamed(agent, "What is 3 + 4?")
        events = [event.type async for event in streamed.stream_events()]
        items = [item.type for item in streamed.new_items]
        found[name] = {
            "answer": whole.final_output,
            "streamed": streamed.final_output,
            "events": sorted(set(events)),
            "items": items,
            "usage": whole.context_wrapper.usage.output_tokens,
        }
    print(json.dumps({"found": found, "asked": ASKED}))


asyncio.run(main(sys.argv[1]))
