/** The models that the server has, and which one a conversation asks. */

import { get, path, type List, type ModelName } from "./api";
import { Value } from "./store";

const CHOSEN = "perdure-model";

export const models = new Value<ModelName[]>([]);

export async function readModels(): Promise<void> {
  models.value = (await get<List<ModelName>>(path("models"))).data;
}

/** Models by themselves, without the names that add an adapter. */
export function bases(): ModelName[] {
  return models.value.filter((model) => !model.adapter);
}

export function adaptersOf(model: string): Record<string, number> {
  const own = models.value.filter((each) => each.adapter && each.id === `${model}:${each.adapter.name}`);
  return Object.fromEntries(own.map((each) => [each.adapter!.name, each.adapter!.scale]));
}

/** The model that was chosen for a conversation, the last choice for a new one, else the server's first. */
export function chosenModel(session: string | null): ModelName | undefined {
  const known = bases();
  const wanted = (session !== null && localStorage.getItem(`${CHOSEN}/${session}`)) || localStorage.getItem(CHOSEN);
  return known.find((model) => model.id === wanted) ?? known[0];
}

export function chooseModel(session: string | null, id: string): void {
  localStorage.setItem(CHOSEN, id);
  if (session !== null) localStorage.setItem(`${CHOSEN}/${session}`, id);
  models.changed();
}

/** What a request adds to its address so that this model answers. */
export function asModel(session: string | null): string {
  const model = chosenModel(session);
  return model && bases().length > 1 ? `?model=${encodeURIComponent(model.id)}` : "";
}

/** Keep the choice where a conversation gets its name, or another one. */
export function keepModel(from: string | null, to: string): void {
  const model = bases().length > 1 ? chosenModel(from) : undefined;
  if (model) localStorage.setItem(`${CHOSEN}/${to}`, model.id);
}
