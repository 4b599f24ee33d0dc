"""llama-index, unmodified: completions, chats, streams, a tool and vectors, with its clients for OpenAI's API.

`python ask_llama_index.py URL` prints what it saw as JSON.
"""

import asyncio
import json
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike


def get_sum(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


async def agent(llm: OpenAILike) -> str:
    made = FunctionAgent(tools=[FunctionTool.from_defaults(get_sum)], llm=llm, system_prompt="Add.")
    return str(await made.run("What is 3 + 4?"))


def main(url: str) -> None:
    given = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "context_window": 4096}
    llm = OpenAILike(
        model="tiny", is_chat_model=True, is_function_calling_model=True, temperature=0, max_tokens=100, **given
    )
    plain = OpenAILike(model="tiny", is_chat_model=False, temperature=0, max_tokens=5, **given)
    messages = [ChatMessage(role="user", content="What is 3 + 4?")]
    vectors = OpenAILikeEmbedding(model_name="tiny", api_base=f"{url}/v1", api_key="none").get_text_embedding_batch(
        ["one", "two"]
    )
    found = {
        "chat": str(llm.chat(messages).message.content),
        "streamed": "".join(part.delta or "" for part in llm.stream_chat(messages)),
        "completion": plain.complete("." * 16).text,
        "agent": asyncio.run(agent(llm)),
        "vectors": [len(each) for each in vectors],
    }
    print(json.dumps(found))


main(sys.argv[1])
