"""lm-eval's own `hf` model: the requests of tasks, its answers, and the scores of any answers."""

import json
from types import SimpleNamespace
from typing import Any

import lm_eval
import torch
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager


class Recording(HFLM):
    """Of a folder in fp32; `scored` and `written` have its requests and answers."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        super().__init__(pretrained=folder, dtype="float32", device="cpu", batch_size=4)
        self.scored: list[Any] = []
        self.written: list[Any] = []

    def _loglikelihood_tokens(self, requests: Any, **more: Any) -> Any:
        answers = super()._loglikelihood_tokens(requests, **more)
        self.scored += [[*request, *answer] for request, answer in zip(requests, answers)]
        return answers

    def generate_until(self, requests: Any, **more: Any) -> Any:
        answers = super().generate_until(requests, **more)
        self.written += [[*request.args, text] for request, text in zip(requests, answers)]
        return answers


class Replay(LM):
    """Answers that another model gave, by request."""

    def __init__(self, scored: list[Any], written: list[Any]) -> None:
        super().__init__()
        self.scored = {json.dumps(pair): answer for pair, *answer in scored}
        self.written = {json.dumps([text, wanted]): answer for text, wanted, answer in written}

    def loglikelihood(self, requests: Any) -> Any:
        return [tuple(self.scored[json.dumps(request.args)]) for request in requests]

    def loglikelihood_rolling(self, requests: Any) -> Any:
        raise NotImplementedError

    def generate_until(self, requests: Any) -> Any:
        return [self.written[json.dumps(request.args)] for request in requests]


def instances(requests: list[Any]) -> Any:
    return [SimpleNamespace(args=tuple(request)) for request in requests]


def texts(folder: str, prompts: list[Any]) -> list[str]:
    return Recording(folder).generate_until(instances(prompts))


def recorded(folder: str, pairs: list[Any], rolling: list[str], tasks: list[str]) -> dict[str, Any]:
    """All requests and answers, of which rolling ones have no texts, and the scores of the tasks.

    The first pair's context is followed by its three most likely tokens too, with and without
    another token in the place of the last.
    """
    model = Recording(folder)
    ids = model.tok_encode(pairs[0][0])
    with torch.no_grad():
        for _ in range(3):
            ids.append(int(model.model(torch.tensor([ids])).logits[0, -1].argmax()))
    for last in (ids[-1], ids[-1] ^ 1):
        model._loglikelihood_tokens([(None, ids[:-3], [*ids[-3:-1], last])])
    model.loglikelihood(instances(pairs))
    totals = model.loglikelihood_rolling(instances([[text] for text in rolling]))
    results = scores(model, tasks)
    told = {"scored": model.scored, "written": model.written, "context": model.max_length}
    return {**told, "results": results, "totals": totals}


def replayed(scored: list[Any], written: list[Any], tasks: list[str]) -> Any:
    return scores(Replay(scored, written), tasks)


def own(folder: str, tasks: list[str], **options: Any) -> Any:
    return scores(Recording(folder), tasks, **options)


def scores(model: LM, tasks: list[str], **options: Any) -> Any:
    manager = TaskManager(include_defaults=False)
    more = {"bootstrap_iters": 1000, "log_samples": False, **options}
    return lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, **more)["results"]
