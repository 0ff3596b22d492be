//! Pages about recipes, to read: [which one to take](which_recipe), [how delayed scaling works](delayed_scaling), and
//! [where each part of Transformer Engine is found here](from_transformer_engine).

// A page links to files, which work where the repository is browsed. The definitions before it win over its own: they lead to
// the pages here.

#[doc = "[delayed-scaling]: crate::guide::delayed_scaling\n"]
#[doc = "[recipes-epyc]: https://github.com/fp8-rs/fp8/blob/main/fp8-nn/benches/results/2026-11-23-recipes-epyc.md\n"]
#[doc = "[fp8-weights-xeon]: https://github.com/fp8-rs/fp8/blob/main/fp8-nn/benches/results/2026-11-23-fp8-weights-xeon.md\n"]
#[doc = "[attention-f16-xeon]: https://github.com/fp8-rs/fp8/blob/main/fp8-nn/benches/results/2026-11-23-attention-f16-xeon.md\n"]
#[doc = "[convergence]: https://github.com/fp8-rs/fp8/blob/main/fp8-nn/tests/convergence/main.rs\n"]
#[doc = include_str!("../docs/which-recipe.md")]
pub mod which_recipe {}

// Here the picture is part of the page, and the image that refers to its file is hidden.
#[doc = "[which-recipe]: crate::guide::which_recipe\n"]
#[doc = "A picture, a calculation by hand, and the same in code.\n"]
#[doc = "<style>img[src=\"delayed-scaling.svg\"] { display: none }</style>\n"]
#[doc = include_str!("../docs/delayed-scaling.svg")]
#[doc = ""]
#[doc = ""]
#[doc = include_str!("../docs/delayed-scaling.md")]
pub mod delayed_scaling {}

#[doc = "[which-recipe]: crate::guide::which_recipe\n"]
#[doc = "[recipe-readme]: fp8_recipe\n"]
#[doc = "[workspace-readme]: https://github.com/fp8-rs/fp8#compared-with-other-libraries\n"]
#[doc = "[te-coverage]: https://github.com/fp8-rs/fp8/blob/main/docs/transformer-engine.md\n"]
#[doc = include_str!("../docs/from-transformer-engine.md")]
pub mod from_transformer_engine {}
