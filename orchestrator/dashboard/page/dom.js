// Making and changing elements. Text only ever becomes text: nothing that stands on a bus is read as markup.

export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function text(node, value) {
  const wanted = value === null || value === undefined ? "" : String(value);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function attr(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

// Children of `parent`, one an item, kept across updates: what does not change is not touched.
export class Keyed {
  constructor(parent, key, make, patch) {
    Object.assign(this, { parent, key, make, patch, nodes: new Map() });
  }

  update(items) {
    const wanted = new Set();
    let at = this.parent.firstElementChild;
    for (const item of items) {
      const key = this.key(item);
      if (wanted.has(key)) continue;
      wanted.add(key);
      let node = this.nodes.get(key);
      if (!node) {
        node = this.make(item);
        this.nodes.set(key, node);
      }
      if (node === at) at = at.nextElementSibling;
      else this.parent.insertBefore(node, at);
      this.patch(node, item);
    }
    for (const [key, node] of this.nodes) {
      if (!wanted.has(key)) {
        node.remove();
        this.nodes.delete(key);
      }
    }
  }
}

export function copier(command) {
  const button = h("button", { type: "button", class: "copy", title: "Copy this command", "aria-label": `Copy: ${command}` }, h("code", { text: command }));
  button.addEventListener("click", async (event) => {
    event.preventDefault();
    event.stopPropagation();
    try {
      await navigator.clipboard.writeText(command);
      button.classList.add("copied");
      setTimeout(() => button.classList.remove("copied"), 1200);
    } catch {
      getSelection().selectAllChildren(button);
    }
  });
  return button;
}
