from django.db import migrations, models

from kjo_django.migrations._operations import CompareExactly


class Migration(migrations.Migration):
    atomic = False  # MariaDB and MySQL commit each change of a table
    dependencies = [("kjo_django", "0013_text_compared_exactly")]

    operations = [
        migrations.CreateModel(
            name="RateWindow",
            fields=[
                (
                    "name",
                    models.CharField(max_length=255, primary_key=True, serialize=False),
                ),
                ("starts", models.TextField(blank=True, default="")),
                ("expires_at", models.DateTimeField()),
            ],
            options={"db_table": "kjo_rate_window", "default_permissions": ()},
        ),
        CompareExactly("RateWindow"),
        *(
            migrations.AddField(
                model_name=model,
                name="unused_permit_count",
                field=models.PositiveBigIntegerField(
                    db_default=0,
                    default=0,
                    help_text="Permits of a rate whose job did not start in time.",
                    verbose_name="permits not used",
                ),
            )
            for model in ("metricbucket", "metricrollup")
        ),
    ]
