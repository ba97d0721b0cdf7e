"""A server that speaks OpenAI's protocol. It needs `skipsearch[serve]`.

Many requests wait, and one thread decodes. A request goes this way: `app` takes it over HTTP,
`asked` reads it field by field and refuses by name what it cannot carry out, `service` turns it
into a request of the decoder, `desk` lets those that run take turns, a round of each, and `answers`
puts the tokens into OpenAI's shapes. `keys`, `limits` and `prefixes` keep users apart; `metrics`
counts, without any text."""
