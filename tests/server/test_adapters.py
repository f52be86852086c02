"""LoRA adapters over HTTP: --lora and --lora-scaled, /lora-adapters, and `lora` of a request."""

import pytest
from random_gguf.adapter import write_adapter
from server.running import Running

from pyggml_spec.loading import DEMO_TARGET

pytestmark = pytest.mark.slow


def test_adapters_of_the_server_and_of_a_request(tmp_path):
    one, two = (write_adapter(tmp_path / f"{i}.gguf", DEMO_TARGET, seed=i, size=0.05) for i in range(2))
    with Running("--lora", one, "--lora-scaled", f"{two}:0.5", "-np", 2, "-c", 512, "--draft-width", 4) as server:
        listed = server.http.get("/lora-adapters").json()
        assert [(a["id"], a["path"], a["scale"]) for a in listed] == [(0, str(one), 1.0), (1, str(two), 0.5)]

        def text(**more) -> str:
            return server.ok("/completion", prompt="import os\n\n\ndef walk(path):\n", n_predict=24, temperature=0, **more)["content"]

        both, first, none = text(), text(lora=[{"id": 0, "scale": 1.0}]), text(lora=[{"id": 0, "scale": 0}])
        assert len({both, first, none}) == 3 and text(lora=[{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.5}]) == both
        assert server.http.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}]).json() == {"success": True}
        assert text() == first and [a["scale"] for a in server.http.get("/lora-adapters").json()] == [1.0, 0.0]
        for body in ({"lora": [{"id": 2, "scale": 1.0}]}, {"lora": [{"id": -1}]}, {"lora": "x"}):
            refused = server.post("/completion", prompt="a", **body)
            assert refused.status_code == 400 and "lora" in refused.json()["error"]["message"]
        assert server.http.post("/lora-adapters", json=[{"id": "x"}]).status_code == 400
