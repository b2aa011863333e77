# %% [markdown]
# # A first run, from a preset to an answer
# Cells run in order, in a notebook or as a script. They write the folder `demo`, and take a minute
# or two on two CPU cores.

# %%
import disttrain_cli as dt

made = dt.init("demo", preset="tiny", sample_data=True)
run = dt.open_run(made.path, "train.steps=4", "samples.images=0", "samples.read=0")
print(made.path, *made.data)

# %% [markdown]
# ## Costs and a plan
# `profile` measures modules, links and data here; `plan` searches the layouts that fit, here
# into two of the devices.

# %%
costs = dt.profile(run, device="cpu").profile
print({name: module.parameters for name, module in costs.modules.items()})

# %%
best = dt.plan(run, gpus=2, sensitivity=False)
print(*best.explanation.sentences, sep="\n")

# %% [markdown]
# ## Training
# A process per rank starts on this host; `on_step` is called with the figures of every step.

# %%
losses = []
trained = dt.train(run, on_step=lambda step: losses.append(step["loss"]))
print(losses)

# %% [markdown]
# ## What the traces say
# The verdict, a report page, and any SELECT as an Arrow table.

# %%
explained = dt.analyze(trained.run_dir)
print(explained.analysis.verdict.headline)
print(explained.report)

# %%
slowest = dt.sql(
    "SELECT operation, sum(duration_ns) / 1e6 AS ms FROM operations GROUP BY ALL ORDER BY ms DESC",
    trained.run_dir,
)
print(*slowest.to_pylist()[:3], sep="\n")

# %% [markdown]
# ## What the model writes
# After four steps it has learned nothing yet: raise `train.steps` above.

# %%
said = dt.sample(trained.checkpoint, prompts=["Draw a seven."], count=0, tokens=8)
print([written.text for written in said.samples.written])

# %% [markdown]
# Errors are `dt.DisttrainError`: what happened, why, and the call that helps.

# %%
try:
    dt.train(run)
except dt.DisttrainError as error:
    print(error)
