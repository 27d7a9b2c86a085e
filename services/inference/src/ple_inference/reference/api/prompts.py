"""Request bodies to prompts: template, tokenizer, images."""

from __future__ import annotations

import asyncio
from typing import Any

from ple_inference.reference.api.errors import bad_request
from ple_inference.reference.chat_prompt import MessageError, RenderedChat
from ple_inference.reference.images import ImageError
from ple_inference.reference.sequence import Prompt
from ple_inference.reference.service import Service


async def chat_prompt(
    service: Service, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]
) -> tuple[Prompt, RenderedChat]:
    """Render and tokenize messages, off the event loop. Raises ApiError."""
    return await asyncio.to_thread(_chat_prompt, service, messages, tools, options)


def _chat_prompt(
    service: Service, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]
) -> tuple[Prompt, RenderedChat]:
    try:
        rendered = service.template.render(messages, tools, options)
    except MessageError as error:
        raise bad_request(str(error), "messages") from error
    urls = rendered.image_urls
    if len(urls) > service.settings.max_images:
        raise bad_request(f"{len(urls)} images; at most {service.settings.max_images} are taken", "messages")
    tokens = service.vocabulary.encode(rendered.text)
    if tokens.count(service.image_token_id) != len(urls):
        raise bad_request("the text holds an image placeholder that no image belongs to", "messages")
    if not urls:
        return Prompt(tokens), rendered
    try:
        images = service.images.read(urls)
    except ImageError as error:
        raise bad_request(str(error), "messages", "invalid_image") from error
    counts = iter(service.images.placeholders(images))
    expanded: list[int] = []
    for token in tokens:
        expanded += [token] * (next(counts) if token == service.image_token_id else 1)
    return Prompt(expanded, images), rendered


def text_prompt(service: Service, prompt: str | list[int]) -> Prompt:
    """A prompt as it is: no template. Raises ApiError."""
    tokens = service.vocabulary.encode(prompt) if isinstance(prompt, str) else prompt
    if not tokens:
        raise bad_request("the prompt has no tokens", "prompt")
    if any(token >= service.vocab_size for token in tokens):
        raise bad_request(f"a token id outside the vocabulary of {service.vocab_size}", "prompt")
    if service.image_token_id in tokens:
        raise bad_request("images need /v1/chat/completions", "prompt")
    return Prompt(tokens)
