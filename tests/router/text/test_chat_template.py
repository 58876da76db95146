from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.text.chat_template import ChatTemplate
from router.text.errors import ModelFilesError, TemplateError

CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hi <b>&\"'"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "日本 🦖"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "name": None},
        {"role": "user", "content": "c\n"},
    ],
)
# what real templates use beyond loops: namespaces, loop controls, JSON, special tokens, generation marks
TEMPLATES = (
    "{{ bos_token }}{% for message in messages %}\n    {% if loop.last %}\n[LAST] {% endif %}{{ message.content }}"
    "{{ eos_token }}{% endfor %}",
    "{% set ns = namespace(count=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% set ns.count = ns.count + 1 %}{{ m.content | tojson }}{% endfor %}{{ ns.count }}",
    "{% for m in messages %}{% if m['name'] is defined %}{{ m['name'] }}{% endif %}{{ m | tojson(indent=2) }}"
    "{% if loop.index0 == 1 %}{% break %}{% endif %}{% endfor %}{% if tools %}tools{% endif %}",
    "{% for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}",
)


def reference(source: str, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    # as `apply_chat_template` does before it
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    rendered, _ = render_jinja_template(
        [plain],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    return str(rendered[0])


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_it_renders_as_transformers_renders(
    source: str, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(messages, add_generation_prompt) == reference(source, messages, add_generation_prompt)


def test_the_models_own_template_is_the_one_transformers_applies(model_folder: Path) -> None:
    from transformers import AutoTokenizer

    template = ChatTemplate.load(model_folder)
    assert template is not None
    theirs = AutoTokenizer.from_pretrained(model_folder)
    for messages in CHATS:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected


def test_strftime_now_is_there() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([]))


def test_a_template_that_refuses_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.render(CHATS[0])


def test_a_message_that_breaks_the_template_is_a_template_error(model_folder: Path) -> None:
    template = ChatTemplate.load(model_folder)
    assert template is not None
    with pytest.raises(TemplateError, match="content"):
        template.render([{"role": "user"}])
    with pytest.raises(TemplateError, match="TypeError"):
        template.render([{"role": "user", "content": 3}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_is_kept_in_its_sandbox(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render(CHATS[0])


def test_a_template_that_does_not_compile_is_found_when_it_is_loaded() -> None:
    with pytest.raises(ModelFilesError, match="doesn't compile"):
        ChatTemplate("{% for %}")


def write_config(folder: Path, config: Any) -> None:
    (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))


def test_the_template_may_be_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    write_config(tmp_path, {"bos_token": {"content": "<s>"}, "chat_template": "{{ bos_token }}A"})
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render([]) == "<s>A"


def test_of_several_templates_the_default_is_taken_and_a_file_wins(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write_config(tmp_path, {"chat_template": named})
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render([]) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    template = ChatTemplate.load(tmp_path)
    assert template is not None and template.render([]) == "F"


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


@pytest.mark.parametrize("config", ["{", "[]", {"chat_template": 3}])
def test_a_damaged_configuration_is_named(tmp_path: Path, config: Any) -> None:
    write_config(tmp_path, config)
    with pytest.raises(ModelFilesError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)
