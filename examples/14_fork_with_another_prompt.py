"""A fork with another system prompt: subagents are told something of their own, and read what their parent has read.

Under another system prompt a prefix cache finds nothing. Where `inherits` allows it by name, and within one thread, a
chat model takes what its parent's call has encoded: in plain calls, and in a stock LangGraph program that delegates.
It needs `langchain-choreo`: pip install ./integrations/langchain
"""

from langchain_choreo import ChatChoreo
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.graph import MessagesState, StateGraph
from langgraph.types import Send

from choreo_agents import Engine

PARENT = SystemMessage("Answer from the notes.")
TALK = [
    HumanMessage("Report 1: Ann has 3 red kites. Bob visits Oslo. Cleo likes soup. Dan has 4 gold rings."),
    HumanMessage("Report 2: Finn has 5 black hats. Gail visits Rome. Hugo likes tea. Ida has 7 green bags."),
    HumanMessage("What does Dan have?"),
]
SUBAGENTS = {
    "Alice": ("Notes: Walt has 2 blue cups.", "What does Ann have?"),
    "Bruno": ("Check it.", "What does Ida have?"),
    "Clara": ("Notes: Vera has 8 pink shells. Omar has 6 gray boots.", "What does Finn have?"),
}
FORK = {"reuse": "anywhere", "inherits": ("parent.system",)}
THREAD = {"configurable": {"thread_id": "one conversation"}}


def ask_parent(state, config):
    chat = ChatChoreo(engine=engine, agent="parent", reuse="anywhere", max_tokens=12)
    return {"messages": [*state["messages"], chat.invoke([PARENT, *state["messages"]], config)]}


def ask_subagent(task, config, reuse=FORK):
    system, question = SUBAGENTS[task["name"]]
    chat = ChatChoreo(engine=engine, agent=task["name"], max_tokens=12, **reuse)
    said = chat.invoke([SystemMessage(system), *task["messages"], HumanMessage(question)], config)
    whole, found = said.usage_metadata["input_tokens"], said.usage_metadata["input_token_details"]["cache_read"]
    print(f"  {task['name']}: {said.text:<22} {whole - found:>3} tokens read, {found:>3} not again")
    return {"messages": said}


def delegate(state):
    return [Send("subagent", {"name": name, "messages": state["messages"]}) for name in SUBAGENTS]


for title, reuse in (("with a prefix cache", {}), ("forked", FORK)):
    with Engine.load("embedded") as engine:
        talk = ask_parent({"messages": TALK}, THREAD)["messages"]
        print(f"{title}, once the parent has said: {talk[-1].text}")
        for name in SUBAGENTS:
            ask_subagent({"name": name, "messages": talk}, THREAD, reuse)

graph = StateGraph(MessagesState)
graph.add_node("parent", ask_parent).add_node("subagent", ask_subagent)
graph.set_entry_point("parent").add_conditional_edges("parent", delegate, ["subagent"])
with Engine.load("embedded") as engine:
    print("forked in a graph:")
    graph.compile().invoke({"messages": TALK}, THREAD)
