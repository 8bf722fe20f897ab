"""Model files made from others: quantised, compared, merged, fused with an adapter, converted.

tensors         the tensors of a GGUF or safetensors file as floats, a few rows at a time; GGUF written
safetensors     safetensors files, read with every claim of their header checked, and written
quantize        llama.cpp's quantiser in a child process; importance matrices from texts
quantize_child  that process
structures      what it hands to the library
compare         two files, tensor by tensor
merge           several models into one (linear, SLERP, TIES), an adapter into its base
peft            a PEFT adapter's folder as a GGUF adapter
trained         a trained model's folder as a GGUF file
commands        `perdure quantize`, `compare`, `merge`, `fuse`, `convert`

Nothing here holds more of a model in memory than a few rows of a tensor, and no output appears half written.
"""

from perdure.spi import Extension, ExtensionCommand

EXTENSION = Extension(
    name="weights",
    commands=(
        ExtensionCommand(name="quantize", target="perdure.ext.weights.commands:quantize", section="Models"),
        ExtensionCommand(name="compare", target="perdure.ext.weights.commands:compare", section="Models"),
        ExtensionCommand(name="merge", target="perdure.ext.weights.commands:merge", section="Models"),
        ExtensionCommand(name="fuse", target="perdure.ext.weights.commands:fuse", section="Models"),
        ExtensionCommand(name="convert", target="perdure.ext.weights.commands:convert", section="Models"),
    ),
)
