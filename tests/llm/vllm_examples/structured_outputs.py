"""Texts of a given form: a choice, a regular expression, a JSON schema, a grammar."""

import json
import re

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model="parlay-mini", max_model_len=256)


def generate(prompt, structured_outputs, **others):
    sampling_params = SamplingParams(structured_outputs=structured_outputs, temperature=0, **others)
    return llm.generate(prompt, sampling_params=sampling_params)[0].outputs[0].text


choice = StructuredOutputsParams(choice=["Positive", "Negative"])
assert generate("Classify this sentiment: vLLM is wonderful!", choice) in ("Positive", "Negative")

regex = StructuredOutputsParams(regex=r"\w{1,12}@\w{1,12}\.com\n")
text = generate("An email address of Alan Turing: ", regex, stop=["\n"], max_tokens=50)
assert re.fullmatch(r"\w{1,12}@\w{1,12}\.com", text)

schema = {
    "type": "object",
    "properties": {"brand": {"type": "string", "maxLength": 8}, "kind": {"enum": ["sedan", "SUV", "Truck"]}},
    "required": ["brand", "kind"],
    "additionalProperties": False,
}
car = json.loads(generate("A car of the 90's as JSON: ", StructuredOutputsParams(json=schema), max_tokens=100))
assert car["kind"] in ("sedan", "SUV", "Truck")

compact = {"json": schema, "disable_any_whitespace": True}
assert generate("A car: ", compact, max_tokens=100).startswith('{"brand": "')

grammar = """
root ::= "SELECT " column " from " table where
column ::= "col_1" | "col_2"
table ::= "table_1" | "table_2"
where ::= " where " column "= " number
number ::= "1" | "2"
"""
query = generate("An SQL query: ", StructuredOutputsParams(grammar=grammar), max_tokens=100)
assert re.fullmatch(r"SELECT col_. from table_. where col_.= .", query)
