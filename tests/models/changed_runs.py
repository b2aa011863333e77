"""Runs with modules in the place of their own."""


def with_modules(run, **modules):
    plain = run.file.model_dump(mode="json", exclude_none=True)
    plain["model"]["modules"] |= modules
    return type(run)(path=run.path, file=type(run.file).model_validate(plain))


def with_generator(run, **fields):
    """Its generator draws 16 x 16 pixels from four tokens, unless `fields` say otherwise."""
    generator = {"kind": "generator", "image_size": 16, "context_tokens": 4, **fields}
    return with_modules(run, image_generator=generator)
