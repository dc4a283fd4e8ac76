"""Reflection: a writer's essay is criticised as if a person had written it, and the critique is told to the writer."""

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, MessagesState, StateGraph

WRITE = "Write what you are asked for, and again when it was criticised."
CRITICISE = "Criticise what was written."


def again(state):
    return "critic" if len(state["messages"]) < 6 else END


def program(model):
    graph = StateGraph(MessagesState)

    def writer(state):
        return {"messages": [model.invoke([SystemMessage(WRITE), *state["messages"]])]}

    def critic(state):
        first, *others = state["messages"]
        swapped = [{"ai": HumanMessage, "human": AIMessage}[each.type](each.text, name=each.name) for each in others]
        said = model.invoke([SystemMessage(CRITICISE), first, *swapped])
        return {"messages": [HumanMessage(said.text, name="critic")]}

    graph.add_node("writer", writer)
    graph.add_node("critic", critic)
    graph.add_edge(START, "writer")
    graph.add_conditional_edges("writer", again, ["critic", END])
    graph.add_edge("critic", "writer")
    return graph.compile()
