"""Each row of the table beside other servers is a promise that a test keeps."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.serve.generation.test_clients import REQUESTS

HERE = Path(__file__).parent
DOCUMENT = (HERE.parents[1] / "docs" / "reference" / "compatibility.md").read_text(encoding="utf-8")
TABLE = DOCUMENT.partition("\n## Clients of other servers\n")[2]
ROWS = [line.split("|")[1].strip() for line in TABLE.splitlines() if re.match(r"\| [^|-]", line)]
TESTS = {
    "chat completions, whole and streamed": "generation/test_openai_client.py::test_a_stream_adds_up_to_the_answer",
    "`echo` with log-probabilities of the prompt": (
        "generation/test_logprobs.py::test_echo_tells_how_likely_the_prompt_was_as_harnesses_ask_it"
    ),
    "log-probabilities while drafting": "generation/test_logprobs.py::test_of_chat_equal_those_of_the_python_api",
    "Predicted Outputs": "generation/test_prediction.py::test_a_prediction_is_drafted_from_and_counted",
    "a strategy for each request, all with the same text": (
        "generation/test_completions.py::test_the_text_is_that_of_the_python_api_whatever_the_strategy"
    ),
    "an answer that follows a JSON schema": "generation/test_responses.py::test_an_answer_keeps_to_a_schema",
    "a call of a named function that follows its schema": "generation/test_responses.py::test_a_call_that_must_come",
    "`functions` and `function_call`": "generation/test_fields.py::test_functions_of_the_old_shape",
    "reasoning separate from the answer": "generation/test_reasoning.py::test_reasoning_and_answer_wherever_pieces_end",
    "Responses, with the events that the official client reads": (
        "generation/test_responses.py::test_a_stream_adds_up_to_the_response"
    ),
    "Responses, `previous_response_id`": "generation/test_responses.py::test_a_conversation_goes_on",
    "Responses, function calls and their results": "generation/test_responses.py::test_a_call_that_must_come",
    "Messages (Anthropic's), whole and streamed": (
        "generation/test_anthropic_client.py::test_a_stream_has_the_text_of_the_whole_answer"
    ),
    "Messages, `count_tokens`": "generation/test_anthropic_client.py::test_system_is_text_or_blocks_and_counts",
    "Messages, tool calls and their results": (
        "generation/test_anthropic_client.py::test_a_call_and_its_result_go_back_to_the_model"
    ),
    "Messages, a required tool call that follows its schema": (
        "generation/test_anthropic_client.py::test_a_tool_that_must_be_called_is_called_with_valid_input"
    ),
    "Messages, an answer that follows a JSON schema": (
        "generation/test_anthropic_client.py::test_an_answer_keeps_to_a_schema"
    ),
    "reasoning separate from the answer in every vendor's client": (
        "generation/test_thinking.py::test_every_vendors_client_has_the_reasoning_apart"
    ),
    "Ollama's `/api/chat` and `/api/generate`": (
        "generation/test_ollama_client.py::test_a_stream_is_a_line_for_each_step_and_has_the_same_text"
    ),
    "Ollama's `format`, `options`, `tools`": (
        "generation/test_ollama_client.py::test_format_holds_the_answer_to_json_or_a_schema"
    ),
    "Ollama's log-probabilities": "generation/test_ollama_client.py::test_log_probabilities_come_with_the_text",
    "Ollama's `/api/tags`, `/api/show`, `/api/ps`": (
        "generation/test_ollama_client.py::test_models_are_listed_shown_and_told_of_when_loaded"
    ),
    "Ollama's `/api/pull`": "generation/test_ollama_client.py::test_what_is_pulled_is_told_of_and_served",
    "the reply names fields without effect": (
        "generation/test_fields.py::test_fields_without_effect_are_named_in_a_header"
    ),
    "unsupported samplers are refused by name": (
        "generation/test_fields.py::test_what_would_change_the_text_is_refused_by_its_path"
    ),
    "`best_of`": "generation/test_fields.py::test_the_best_of_several_samples",
    "a vote of several chains of thought that ends early": "generation/test_voting.py::test_a_completion_by_vote",
    "sections of an answer written at once, from an outline": (
        "generation/test_outlined.py::test_an_answer_by_outline_has_its_sections_in_order"
    ),
    "another model drafts steps of the answer (`reason_ahead`)": (
        "generation/test_reason_ahead.py::test_the_text_and_the_usage_are_those_of_plain_decoding"
    ),
    "several drafts with the forwards of one (`superposed`)": (
        "generation/test_superposed.py::test_a_completion_may_be_superposed"
    ),
    "`continue_final_message`": "generation/test_fields.py::test_the_last_message_is_gone_on_with",
    "`bad_words`, `allowed_token_ids`": "generation/test_fields.py::test_bad_words_do_not_come",
    "adapters chosen by request and loaded over HTTP": (
        "test_adapters.py::test_an_adapter_is_loaded_named_as_a_model_listed_and_unloaded"
    ),
    "embeddings, reranking": "test_embeddings.py::test_embeddings_are_the_states_that_the_head_reads",
    "`openai`": "generation/test_openai_client.py::test_an_answer_is_the_one_of_the_python_api",
    "`anthropic`": "generation/test_anthropic_client.py::test_a_stream_has_the_text_of_the_whole_answer",
    "`ollama`": "generation/test_ollama_client.py::test_a_chat_has_the_text_of_a_chat_completion",
    "Open WebUI, as OpenAI's API": (
        "generation/test_clients.py::test_open_webui_finds_models_as_those_of_openai_and_chats_with_them"
    ),
    "Open WebUI, as Ollama's API": (
        "generation/test_clients.py::test_open_webui_finds_models_as_those_of_ollama_and_chats_with_them"
    ),
    **dict.fromkeys(REQUESTS, "generation/test_clients.py::test_what_it_sends_is_answered"),
}


def test_every_row_has_its_test() -> None:
    assert set(TESTS) == set(ROWS)


@pytest.mark.parametrize("named", sorted(set(TESTS.values())))
def test_the_tests_are_there(named: str) -> None:
    file, _, function = named.partition("::")
    nodes = ast.walk(ast.parse((HERE / file).read_text(encoding="utf-8")))
    assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
