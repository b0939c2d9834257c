"""JSON Schema of a config file, with the verdict of each key as its description."""

from typing import Any

from jaxspeed.config.auto import accepts_auto
from jaxspeed.config.deepspeed_forms import ALIASES
from jaxspeed.config.schema import Settings
from jaxspeed.config.tree import PARAMS

COMMENT = "^_"


def json_schema() -> dict[str, Any]:
    """Build Pydantic's schema with each key's verdict as its description.

    Sections are inlined, without references, since a verdict depends on the key's path.
    """
    raw = Settings.model_json_schema(mode="validation")
    definitions = raw.pop("$defs", {})
    schema = _inlined(raw, definitions, "")
    for old, new in ALIASES.items():
        section, _, name = old.rpartition(".")
        properties = schema["properties"]
        for part in section.split(".") if section else ():
            properties = properties[part]["properties"]
        properties[name] = properties[new.rpartition(".")[2]]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "jaxspeed config"
    schema["description"] = "DeepSpeed's keys, and jaxspeed's sections."
    return schema


def _inlined(node: Any, definitions: dict[str, Any], path: str) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions, path) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        node = {**definitions[node["$ref"].rpartition("/")[2]], **node}
        del node["$ref"]
    node = {
        key: _inlined(value, definitions, path) if key != "properties" else value
        for key, value in node.items()
    }
    if "properties" in node:
        prefix = f"{path}." if path else ""
        node["properties"] = {
            name: _described(_inlined(value, definitions, prefix + name), prefix + name)
            for name, value in node["properties"].items()
        }
        node["patternProperties"] = {COMMENT: {}}
    return node


def _described(node: dict[str, Any], path: str) -> dict[str, Any]:
    if path in PARAMS:
        node["anyOf"] = [_params(model, path) for model in dict.fromkeys(PARAMS[path].values())]
    elif path.rpartition(".")[2] == "type" and f"{path.removesuffix('type')}params" in PARAMS:
        names = PARAMS[f"{path.removesuffix('type')}params"]
        node["enum"] = [*names, *(name.lower() for name in names)]
    elif path in accepts_auto():
        auto = {"const": "auto"}
        of_key = {name: node.pop(name) for name in ("default", "description") if name in node}
        node = {"anyOf": [*node.pop("anyOf", [node]), auto]} | of_key
    node["title"] = path
    return node


def _params(model: Any, path: str) -> dict[str, Any]:
    raw = model.model_json_schema(mode="validation")
    return _inlined(raw, raw.pop("$defs", {}), path)
