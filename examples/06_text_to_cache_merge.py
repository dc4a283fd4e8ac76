"""A stock LangGraph that merges its branches' text, then three changed lines: the same graph merges their caches."""

from langchain_core.messages import AIMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from choreo_agents import Agent, ChoreoState, Engine, Synthesizer

RULES = "Work in parts."
ASKED = {"Alice": "Write part 1.", "Bruno": "Write part 2.", "Clara": "Write part 3."}
MERGE = "Write all parts again."
PARTS = (
    "Ann with red kites, Bob with blue boats",
    "Cleo with green drums, Dan with gold rings",
    "Eve with white cups, Finn with black hats",
)
PROBLEM = f"Write about {', '.join(PARTS)} in parts of 2."
PLAN = " ".join(f"Part {number}: {part}." for number, part in enumerate(PARTS, start=1))


def text_node(engine, name, asked):
    """Text in, text out, as with any model behind an API."""
    chat = engine.chat

    def speak(state):
        turns = [chat.turn("assistant" if m.type == "ai" else "user", m.text, m.name) for m in state["messages"]]
        prompt = engine.prefill(sum([*turns, chat.turn("user", asked)], chat.root(RULES)))
        words = engine.text(engine.decode(chat.header(name), [prompt]), special=False)
        return {"messages": [AIMessage(words.removeprefix(f" {name}:").strip(), name=name)]}

    return speak


def before(engine):
    graph = StateGraph(MessagesState)
    for name, asked in ASKED.items():
        graph.add_node(name, text_node(engine, name, asked))
        graph.add_edge(START, name)
    graph.add_node("David", text_node(engine, "David", MERGE))
    graph.add_edge(list(ASKED), "David").add_edge("David", END)
    return graph.compile()


def after(engine):
    graph = StateGraph(ChoreoState)  # 1: handles beside the messages
    for name, asked in ASKED.items():
        graph.add_node(name, Agent(name, engine=engine, public=RULES, prompt=asked))  # 2: branches leave handles
        graph.add_edge(START, name)
    graph.add_node("David", Synthesizer("David", engine=engine, public=RULES, merges=list(ASKED), prompt=MERGE))  # 3
    graph.add_edge(list(ASKED), "David").add_edge("David", END)
    return graph.compile()


for build, method in ((before, "baseline"), (after, "choreo")):  # baseline: an engine with a prefix cache
    with Engine.load("embedded", method=method) as engine:
        state = build(engine).invoke({"messages": [("user", PROBLEM), AIMessage(PLAN, name="Emma")]})
        stats = engine.stats()
        print(f"{build.__name__}: {state['messages'][-1].text}")
        print(f"{build.__name__}: {stats.tokens_encoded} tokens encoded, {stats.tokens_reused} reused")
