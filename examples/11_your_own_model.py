"""Your own model: any folder in Hugging Face's layout, checked as it is loaded, then served like the embedded one."""

import tempfile
from pathlib import Path

from choreo_agents import END, START, Agent, ChoreoGraph, Engine, Sampling
from choreo_agents.errors import UnsupportedModelError
from choreo_agents.models.random_llama import LlamaShape, save_random_llama

graph = ChoreoGraph(system="You are brief.")
for name in ("writer", "editor"):
    graph.add_node(Agent(name, sampling=Sampling(temperature=1.0, max_tokens=8)))
graph.add_edge(START, "writer").add_edge("writer", "editor").add_edge("editor", END)

with tempfile.TemporaryDirectory() as temporary:
    # Stands for your checkpoint: its weights are random, so what it says is noise. Put your path here, or a hub name.
    folder = Path(temporary) / "my-llama"
    tiny = LlamaShape(layers=4, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, vocabulary=2048)
    save_random_llama(tiny, folder)

    try:
        engine = Engine.load(folder)  # device="cuda", dtype=torch.bfloat16, memory=Memory(...) as you need
    except UnsupportedModelError as error:  # positions that no rotation can move, recurrent layers, ...
        raise SystemExit(f"it cannot be served exactly: {error}") from error

    with engine:
        # What `choreo models check` prints: loading has compared its logits, cached keys moved, with a plain forward.
        model = engine.model
        print(f"{model.adapter.parameters / 1e6:.2f} M parameters, a context of {model.adapter.max_positions:,} tokens")
        print(f"moving cached keys changes logits by {model.probe.error:.1g}; {model.probe.tolerance:.1g} is rounding")
        print(f"its chat template writes {engine.chat.turn('user', 'Hello.').text!r}")

        state = graph.compile(engine=engine).invoke({"messages": [("user", "Write about kites.")]})
        for message in state["messages"]:
            print(f"{message.name or 'you':>7}: {message.text!r}")
        stats = engine.stats()
        print(f"{stats.tokens_encoded} tokens encoded, {stats.tokens_reused} reused from the cache")
