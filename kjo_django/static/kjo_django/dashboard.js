// Refreshes the live part of a page, and helps the keyboard. Without it every page works, once.
"use strict";

(() => {
    const live = document.getElementById("kjo-live");
    const choice = document.getElementById("kjo-refresh");
    const state = document.getElementById("kjo-refresh-state");
    const spoken = document.getElementById("kjo-spoken");
    const STORE = "kjo-refresh";
    const SPEAK_EVERY = 15000;
    const texts = choice ? choice.dataset : {};
    let etag = null;
    let timer = null;
    let failures = 0;
    let isAsking = false;
    let spokenAt = 0;

    function stored() {
        try {
            return localStorage.getItem(STORE);
        } catch {
            return null; // storage may be forbidden
        }
    }

    function store(value) {
        try {
            localStorage.setItem(STORE, value);
        } catch {
            // the choice lasts as long as the page then
        }
    }

    function seconds() {
        return Number(choice.value);
    }

    function plan() {
        clearTimeout(timer);
        if (seconds() > 0 && !document.hidden) {
            timer = setTimeout(refresh, seconds() * 1000 * Math.min(2 ** failures, 16));
        }
    }

    async function refresh() {
        if (isAsking) {
            return;
        }
        isAsking = true;
        try {
            const headers = { "X-Kjo-Fragment": "1" };
            if (etag) {
                headers["If-None-Match"] = etag;
            }
            const database = document.querySelector("#kjo-act [name=database]");
            if (database) {
                headers["X-Kjo-Database"] = database.value;
            }
            const response = await fetch(location.href, {
                headers, cache: "no-store", redirect: "manual", credentials: "same-origin",
            });
            if (response.type === "opaqueredirect" || response.status === 403) {
                choice.value = "0";
                show(texts.signedOut);
                return;
            }
            if (response.status === 200) {
                etag = response.headers.get("ETag");
                morph(await response.text());
            } else if (response.status !== 304) {
                throw new Error(String(response.status));
            }
            failures = 0;
            show("");
        } catch {
            failures += 1;
            show(texts.away);
        } finally {
            isAsking = false;
            plan();
        }
    }

    function morph(html) {
        Idiomorph.morph(live, html, {
            morphStyle: "innerHTML",
            ignoreActiveValue: true,
            callbacks: {
                // What the operator chose or typed stays.
                beforeNodeMorphed: (old) => !(old.matches && old.matches("[data-kjo-keep]")),
                beforeAttributeUpdated: (name) => name !== "open",
            },
        });
        showTime();
        speak();
    }

    function speak() {
        const summary = live.querySelector("[data-kjo-summary]");
        if (summary && Date.now() - spokenAt > SPEAK_EVERY) {
            if (spoken.textContent !== summary.dataset.kjoSummary) {
                spoken.textContent = summary.dataset.kjoSummary;
                spokenAt = Date.now();
            }
        }
    }

    function show(text) {
        state.textContent = text;
        state.hidden = !text;
    }

    if (live && choice) {
        document.getElementById("kjo-refresh-box").hidden = false;
        const wanted = stored();
        if (wanted !== null && [...choice.options].some((option) => option.value === wanted)) {
            choice.value = wanted;
        }
        choice.addEventListener("change", () => {
            store(choice.value);
            plan();
        });
        document.addEventListener("visibilitychange", () => {
            if (document.hidden) {
                clearTimeout(timer);
            } else if (seconds() > 0) {
                refresh();
            }
        });
        plan();
    }

    // --- One time for all charts --------------------------------------------------------------------

    let shownTime = -1; // the place among the times of the charts; -1 for none

    // Point out one time in every chart, with its values in place of the latest ones.
    function showTime() {
        for (const chart of document.querySelectorAll(".kjo-chart")) {
            const spot = chart.querySelectorAll(".kjo-spot")[shownTime];
            const row = spot && [...chart.querySelectorAll("tbody tr")].at(-1 - shownTime);
            chart.classList.toggle("kjo-has-cursor", Boolean(spot));
            if (spot) {
                const middle = Number(spot.getAttribute("x")) + Number(spot.getAttribute("width")) / 2;
                for (const end of ["x1", "x2"]) {
                    chart.querySelector(".kjo-cursor").setAttribute(end, middle.toFixed(1));
                }
            }
            chart.querySelector(".kjo-cursor-time").textContent = row ? row.cells[0].textContent : "";
            chart.querySelectorAll("[data-kjo-latest]").forEach((line, index) => {
                const value = row ? row.cells[index + 1].textContent : line.dataset.kjoLatest;
                line.querySelector("b").textContent = value;
            });
        }
    }

    document.addEventListener("pointerover", (event) => {
        const spot = event.target.closest(".kjo-spot");
        const place = spot ? [...spot.parentNode.querySelectorAll(".kjo-spot")].indexOf(spot) : -1;
        if (place !== shownTime) {
            shownTime = place;
            showTime();
        }
    });

    // --- A preview beside a form -------------------------------------------------------------------

    const form = document.querySelector("form[data-kjo-preview]");
    const preview = document.getElementById("kjo-preview");
    const UNSENT = ["csrfmiddlewaretoken", "payload"];
    let previewTimer = null;
    let previewNumber = 0;

    async function showPreview() {
        const number = ++previewNumber;
        const values = new URLSearchParams();
        for (const [name, value] of new FormData(form)) {
            if (!UNSENT.includes(name)) {
                values.set(name, value);
            }
        }
        try {
            const response = await fetch(`${form.dataset.kjoPreview}?${values}`, {
                headers: { "X-Kjo-Fragment": "1" }, redirect: "manual", credentials: "same-origin",
            });
            if (response.status === 200 && number === previewNumber) {
                const html = await response.text();
                Idiomorph.morph(preview, html, { morphStyle: "innerHTML" });
            }
        } catch {
            // the button of the form shows it, too
        }
    }

    if (form && preview) {
        form.addEventListener("input", () => {
            clearTimeout(previewTimer);
            previewTimer = setTimeout(showPreview, 300);
        });
    }

    // --- Suggestions of the search ------------------------------------------------------------------

    const words = [...document.querySelectorAll("#kjo-words option")];
    const suggested = words.map((option) => option.value);

    // What is typed before the last word stays, and each suggestion goes on from there.
    document.getElementById("kjo-search")?.addEventListener("input", (event) => {
        const typed = event.target.value.slice(0, event.target.value.lastIndexOf(" ") + 1);
        words.forEach((option, index) => {
            option.value = typed + suggested[index];
        });
    });

    // --- Selecting rows, keys -------------------------------------------------------------------

    document.addEventListener("change", (event) => {
        if (event.target.matches("[data-kjo-all]")) {
            const name = event.target.dataset.kjoAll;
            for (const box of document.querySelectorAll(`input[type=checkbox][name="${name}"]`)) {
                box.checked = event.target.checked;
            }
        }
    });

    // Focus the link of the next or the previous row; Enter opens it as any link.
    function moveRow(step) {
        const links = [...document.querySelectorAll("#kjo-live tbody th[scope=row] a")];
        const row = document.activeElement.closest("tr");
        const place = links.findIndex((link) => row && link.closest("tr") === row);
        const next = place < 0 ? 0 : Math.max(0, Math.min(links.length - 1, place + step));
        links[next]?.focus();
    }

    document.addEventListener("keydown", (event) => {
        if (event.ctrlKey || event.metaKey || event.altKey
            || event.target.matches("input:not([type=checkbox]), textarea, select")) {
            return;
        }
        const search = document.getElementById("kjo-search");
        if (event.key === "/" && search) {
            event.preventDefault();
            search.focus();
        } else if (event.key === "r" && live && choice) {
            refresh();
        } else if (event.key === "j" || event.key === "k") {
            moveRow(event.key === "j" ? 1 : -1);
        } else if (event.key === "x") {
            document.activeElement.closest("tr")?.querySelector("input[type=checkbox]")?.click();
        } else if (event.key === "?") {
            document.getElementById("kjo-keys").showModal();
        } else if (event.shiftKey && /^[A-Z]$/.test(event.key)) {
            document.querySelector(`.kjo-nav a[aria-keyshortcuts="Shift+${event.key}"]`)?.click();
        }
    });
})();
