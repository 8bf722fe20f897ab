import { render } from "preact";
import "./style.css";
import { App } from "./views/App";

render(<App />, document.getElementById("app")!);
