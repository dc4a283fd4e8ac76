"""Long-term memory: what a user has told in one thread is kept in a store, and is known in the next."""

from langchain_core.messages import SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore
from typing_extensions import TypedDict


class Context(TypedDict):
    user: str


def known(state, runtime: Runtime[Context]):
    memories = runtime.store.search(("memories", runtime.context["user"]))
    return f"You are talking to {runtime.context['user']}. " + " ".join(memory.value["told"] for memory in memories)


def remember(state, runtime: Runtime[Context]):
    told = [message.text for message in state["messages"] if message.type == "human"]
    runtime.store.put(("memories", runtime.context["user"]), str(len(told)), {"told": told[-1]})
    return {}


def program(model):
    graph = StateGraph(MessagesState, context_schema=Context)

    def assistant(state, runtime: Runtime[Context]):
        return {"messages": [model.invoke([SystemMessage(known(state, runtime)), *state["messages"]])]}

    graph.add_node("assistant", assistant)
    graph.add_node("remember", remember)
    graph.add_edge(START, "assistant")
    graph.add_edge("assistant", "remember")
    graph.add_edge("remember", END)
    return graph.compile(checkpointer=InMemorySaver(), store=InMemoryStore())
