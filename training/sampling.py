"""Text from the model in training."""

from config.errors import one_line
from config.redact import redact
from config.resolved import Resolved
from config.task import ENCODER_TASKS
from data.corpora.corpus import Corpus
from data.text.tokenizer import load_tokenizer
from modeling.generate import sample_text
from tracking.record import Record
from training.engine import Engine


def sampled(resolved: Resolved, engine: Engine, corpus: Corpus, record: Record) -> str:
    """A sample; empty where none is configured, or a rank cannot read the tokenizer. A collective."""
    generate, tokenizer, problem = resolved.config.generate, None, None
    if not generate.tokens or resolved.config.task in ENCODER_TASKS:
        return ""
    try:
        tokenizer = load_tokenizer(corpus.tokenizer_folder)
    except Exception as error:  # the cache may be gone by now, or damaged; the tokenizers raise plain Exception
        problem = f"no text was sampled: {corpus.tokenizer_folder}: {one_line(error)}"
    problem = next(filter(None, engine.world.gather_objects(problem)), None)
    if problem is not None or tokenizer is None:
        record.note(str(problem))
        return ""
    text = sample_text(
        engine.model,
        tokenizer,
        prompt=generate.prompt,
        tokens=generate.tokens,
        temperature=generate.temperature,
        seed=resolved.config.run.seed,
        device=engine.world.device,
        has_encoder=engine.model.config.is_encoder_decoder,
    )
    return str(redact(text))
